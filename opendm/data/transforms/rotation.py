"""Rotations as vectors: axis times angle in radians, with an angle of at most π."""

import numpy as np


def rpy_to_rotation_vector(rpy: np.ndarray) -> np.ndarray:
    """Rotation vector ``[3]`` of roll, pitch, yaw ``[3]`` (R = Rz · Ry · Rx)."""
    half = np.asarray(rpy, dtype=np.float64) / 2.0
    (sr, sp, sy), (cr, cp, cy) = np.sin(half), np.cos(half)
    quaternion = np.array([
        cr * cp * cy + sr * sp * sy,
        sr * cp * cy - cr * sp * sy,
        cr * sp * cy + sr * cp * sy,
        cr * cp * sy - sr * sp * cy,
    ])  # fmt: skip
    return quaternion_to_vector(quaternion)


def vector_to_quaternion(vector: np.ndarray) -> np.ndarray:
    """Unit quaternion ``[..., 4]`` (w first) of a rotation vector ``[..., 3]``."""
    vector = np.asarray(vector, dtype=np.float64)
    angle = np.linalg.norm(vector, axis=-1, keepdims=True)
    sine_over_angle = 0.5 * np.sinc(angle / (2.0 * np.pi))
    return np.concatenate([np.cos(angle / 2.0), vector * sine_over_angle], axis=-1)


def quaternion_to_vector(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector ``[..., 3]`` of a unit quaternion ``[..., 4]``; w ≥ 0 is chosen."""
    quaternion = np.where(quaternion[..., :1] < 0, -quaternion, quaternion)
    w, xyz = quaternion[..., :1], quaternion[..., 1:]
    sine = np.linalg.norm(xyz, axis=-1, keepdims=True)
    angle = 2.0 * np.arctan2(sine, w)
    scale = np.where(sine > 1e-12, angle / np.maximum(sine, 1e-12), 2.0)
    return xyz * scale


def compose_rotation_vectors(delta: np.ndarray, current: np.ndarray) -> np.ndarray:
    """Rotation ``current`` followed by ``delta``, broadcast over leading axes."""
    (w1, v1), (w2, v2) = (
        (quaternion[..., :1], quaternion[..., 1:])
        for quaternion in (vector_to_quaternion(delta), vector_to_quaternion(current))
    )
    w = w1 * w2 - (v1 * v2).sum(-1, keepdims=True)
    v = w1 * v2 + w2 * v1 + np.cross(v1, v2)
    vector = quaternion_to_vector(np.concatenate([w, v], axis=-1))
    return vector.astype(np.asarray(delta).dtype)
