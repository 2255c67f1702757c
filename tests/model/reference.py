"""DM0.5 in plain numpy and double precision: prefix pass, action pass, loss and sampling.

Nothing here is fast, and nothing is shared with the package under test: every formula is written
out once more, so that the two can be compared. The history images of a prompt are not covered.

Shapes are written with B samples, L prompt tokens, T action steps, D action dimensions, H hidden
width, N images. All arithmetic is float64; inputs of other types are converted on entry.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Tensors = Mapping[str, Array]
Config = Mapping[str, Any]
Batch = Mapping[str, Any]
KeysValues = list[tuple[Array, Array]]

HIDDEN_TOKEN = 7
"""Id of the token that fills unused history slots; nothing may look at it."""

SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0
"""Range of the periods in the time embedding."""


def real(values: Any) -> Array:
    """Convert anything array-like to float64."""
    return np.asarray(values, dtype=np.float64)


def within(tensors: Tensors, prefix: str) -> dict[str, Array]:
    """The tensors whose names start with `prefix`, named by what follows it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


# --- elementwise functions and normalisations ------------------------------------------------


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))


def gelu(x: Array) -> Array:
    """GELU in its tanh form."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def softmax(scores: Array) -> Array:
    """Softmax over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def unit_rms(x: Array, eps: float) -> Array:
    """Divide by the root mean square of the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Gemma's RMSNorm, whose stored weight is an offset from one."""
    return unit_rms(x, eps) * (1.0 + weight)


def layer_norm(x: Array, weights: Tensors, name: str, eps: float) -> Array:
    """Layer normalisation with weight and bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return unit_rms(centred, eps) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: Array, weights: Tensors, name: str) -> Array:
    """Matrix product with a stored [out, in] weight, plus the bias where there is one."""
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def modulated(x: Array, modulation: Array, eps: float) -> tuple[Array, Array]:
    """Normalise x [B, T, H], then scale and shift it; also return the gate.

    `modulation` [B, 3H] holds scale, shift and gate one after the other.
    """
    scale, shift, gate = np.split(modulation[:, None, :], 3, axis=-1)
    return unit_rms(x, eps) * (1.0 + scale) + shift, gate


def gated_mlp(x: Array, weights: Tensors) -> Array:
    """Gemma's feed-forward block: down(gelu(gate(x)) * up(x))."""
    gate = gelu(linear(x, weights, "mlp.gate_proj"))
    return linear(gate * linear(x, weights, "mlp.up_proj"), weights, "mlp.down_proj")


def time_embedding(t: Any, dim: int) -> Array:
    """Sines, then cosines, of the time at dim/2 periods spaced evenly on a log scale.

    One time gives [dim], a vector of B times gives [B, dim].
    """
    steps = np.arange(dim // 2) / (dim // 2 - 1)
    periods = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** steps
    angles = 2.0 * np.pi * real(t)[..., None] / periods
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


# --- attention -------------------------------------------------------------------------------


def split_heads(x: Array, heads: int) -> Array:
    """[B, L, heads * width] -> [B, heads, L, width]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attend(q: Array, k: Array, v: Array, scale: float, seen: Array | None) -> Array:
    """Softmax attention: [B, heads, L, width] queries give [B, L, heads * width].

    Consecutive query heads share one key/value head. `seen` is a bool that broadcasts to
    [B, query, key]; None lets every query see every key.
    """
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    scores = q @ k.transpose(0, 1, 3, 2) * scale
    if seen is not None:
        scores = np.where(seen[:, None], scores, -np.inf)
    out = softmax(scores) @ v
    return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)


def rotate(x: Array, positions: Array, rope: Config) -> Array:
    """Rotary embedding: turn each pair (i, i + width/2) of x by position * frequency_i.

    x is [B, heads, L, width], positions [B, L], and `rope` one entry of `rope_parameters`.
    """
    if rope["rope_type"] not in {"default", "linear"}:
        raise ValueError(f"rotary scaling {rope['rope_type']!r} is not covered")
    half = x.shape[-1] // 2
    frequencies = rope["rope_theta"] ** (-np.arange(half) / half) / rope.get("factor", 1.0)
    angles = real(positions)[:, None, :, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def queries_keys_values(
    x: Array, w: Tensors, config: Config, kind: str, positions: Array
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one Gemma layer, normalised per head and rotated."""
    eps, rope = config["rms_norm_eps"], config["rope_parameters"][kind]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q = split_heads(linear(x, w, "self_attn.q_proj"), heads)
    k = split_heads(linear(x, w, "self_attn.k_proj"), kv_heads)
    v = split_heads(linear(x, w, "self_attn.v_proj"), kv_heads)
    q = rotate(rms_norm(q, w["self_attn.q_norm.weight"], eps), positions, rope)
    return q, rotate(rms_norm(k, w["self_attn.k_norm.weight"], eps), positions, rope), v


# --- what is visible -------------------------------------------------------------------------


def visible_tokens(input_ids: Array, attention_mask: Array | None, pad_id: int) -> Array:
    """Bool [B, L]: the tokens that may be looked at and that advance the position.

    Without an attention mask, every token but padding counts as attended to.
    """
    ids = np.asarray(input_ids)
    attended = ids != pad_id if attention_mask is None else np.asarray(attention_mask) == 1
    return attended & (ids != HIDDEN_TOKEN)


def token_positions(visible: Array) -> Array:
    """Positions [B, L]: number of visible tokens up to and including this one, less one."""
    return np.maximum(np.cumsum(visible, axis=1) - 1, 0)


def image_blocks(token_type_ids: Array) -> Array:
    """Number each contiguous run of image tokens from zero up; -1 elsewhere."""
    is_image = np.asarray(token_type_ids) == 1
    before = np.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
    return np.where(is_image, np.cumsum(is_image & ~before, axis=1) - 1, -1)


def prefix_visibility(visible: Array, blocks: Array, window: int | None) -> Array:
    """Bool [B, query, key] for the prompt.

    A query sees earlier keys and its own image, as far as the window reaches back (counted in
    places, padding included), where the key is visible; and it always sees itself.
    """
    query, key = np.indices((visible.shape[1],) * 2)
    same_image = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] >= 0)
    reachable = (key <= query) | same_image
    if window is not None:
        reachable &= key > query - window
    return (reachable & visible[:, None, :]) | (key == query)


# --- the model -------------------------------------------------------------------------------


class Reference:
    """The whole model, from checkpoint tensors and the parsed config.json."""

    def __init__(self, tensors: Tensors, config: Mapping[str, Any]) -> None:
        vlm = config["vlm_config"]
        self.text, self.action = vlm["text_config"], config["action_config"]
        self.vision = vlm["vision_config"]
        self.image_tokens = vlm["mm_tokens_per_image"]
        self.image_id = vlm.get("image_token_index", vlm.get("image_token_id", 262144))
        self.pad_id = self.text.get("pad_token_id") or 0
        named = {k.replace("tower.vision_model.", "tower."): real(v) for k, v in tensors.items()}
        self.w = within(named, "model.")

    def images(self, pixel_values: Any) -> Array:
        """Image features in the text model's width: [N, 3, S, S] -> [N, tokens, H]."""
        x = self._vision_tower(real(pixel_values))
        w = within(self.w, "vlm.model.multi_modal_projector.")
        side = int(self.image_tokens**0.5)
        pool = int(x.shape[1] ** 0.5) // side
        x = x.reshape(len(x), side, pool, side, pool, -1).mean(axis=(2, 4))
        x = x.reshape(len(x), side * side, -1)
        eps = self.vision["layer_norm_eps"]
        return rms_norm(x, w["mm_soft_emb_norm.weight"], eps) @ w["mm_input_projection_weight"]

    def _vision_tower(self, pixels: Array) -> Array:
        """SigLIP without its pooling head: [N, 3, S, S] -> [N, patches, width]."""
        w = within(self.w, "vlm.model.vision_tower.")
        heads, size = self.vision["num_attention_heads"], self.vision["patch_size"]
        eps = self.vision["layer_norm_eps"]
        n, channels, height, width = pixels.shape
        cut = pixels.reshape(n, channels, height // size, size, width // size, size)
        cut = cut.transpose(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * size * size)
        kernel = w["embeddings.patch_embedding.weight"]
        x = cut @ kernel.reshape(len(kernel), -1).T + w["embeddings.patch_embedding.bias"]
        x = x + w["embeddings.position_embedding.weight"]
        for i in range(self.vision["num_hidden_layers"]):
            layer = within(w, f"encoder.layers.{i}.")
            y = layer_norm(x, layer, "layer_norm1", eps)
            q, k, v = (split_heads(linear(y, layer, f"self_attn.{c}_proj"), heads) for c in "qkv")
            y = attend(q, k, v, q.shape[-1] ** -0.5, None)
            x = x + linear(y, layer, "self_attn.out_proj")
            y = gelu(linear(layer_norm(x, layer, "layer_norm2", eps), layer, "mlp.fc1"))
            x = x + linear(y, layer, "mlp.fc2")
        return layer_norm(x, w, "post_layernorm", eps)

    def embed(self, input_ids: Any, pixel_values: Any) -> Array:
        """Scaled token embeddings, with image features in place of the image tokens."""
        ids = np.asarray(input_ids)
        is_image = ids == self.image_id
        table = self.w["vlm.model.language_model.embed_tokens.weight"]
        out = table[np.where(is_image, 0, ids)] * np.sqrt(self.text["hidden_size"])
        if pixel_values is not None and len(pixel_values):
            out[is_image] = self.images(pixel_values).reshape(is_image.sum(), -1)
        return out

    def prefix(
        self, input_ids: Any, attention_mask: Any, token_type_ids: Any, pixel_values: Any
    ) -> KeysValues:
        """Keys (normalised and rotated) and values of each layer, [B, kv_heads, L, head_dim]."""
        visible = visible_tokens(input_ids, attention_mask, self.pad_id)
        types = np.zeros(visible.shape) if token_type_ids is None else token_type_ids
        blocks, positions = image_blocks(types), token_positions(visible)
        seen = {
            "full_attention": prefix_visibility(visible, blocks, None),
            "sliding_attention": prefix_visibility(visible, blocks, self.text["sliding_window"]),
        }
        eps, scale = self.text["rms_norm_eps"], self.text["query_pre_attn_scalar"] ** -0.5
        x, out = self.embed(input_ids, pixel_values), []
        for i, kind in enumerate(self.text["layer_types"]):
            w = within(self.w, f"vlm.model.language_model.layers.{i}.")
            y = rms_norm(x, w["input_layernorm.weight"], eps)
            q, k, v = queries_keys_values(y, w, self.text, kind, positions)
            out.append((k, v))
            y = linear(attend(q, k, v, scale, seen[kind]), w, "self_attn.o_proj")
            x = x + rms_norm(y, w["post_attention_layernorm.weight"], eps)
            y = gated_mlp(rms_norm(x, w["pre_feedforward_layernorm.weight"], eps), w)
            x = x + rms_norm(y, w["post_feedforward_layernorm.weight"], eps)
        return out

    def condition(self, time: Any, samples: int) -> Array:
        """What the action layers are modulated by: [B, action width]."""
        embedded = time_embedding(np.broadcast_to(real(time), samples), self.action["hidden_size"])
        return silu(linear(silu(linear(embedded, self.w, "time_mlp_in")), self.w, "time_mlp_out"))

    def velocity(
        self, x_t: Any, time: Any, prefix_kv: KeysValues, input_ids: Any, attention_mask: Any
    ) -> Array:
        """Predicted velocity [B, T, D] of the noisy action `x_t` at `time` ([B] or one number)."""
        x = linear(real(x_t), self.w, "action_in_proj")
        steps, w = x.shape[1], within(self.w, "action_expert.")
        eps, scale = self.action["rms_norm_eps"], self.action["query_pre_attn_scalar"] ** -0.5
        c = self.condition(time, len(x))
        visible = visible_tokens(input_ids, attention_mask, self.pad_id)
        positions = visible.sum(axis=1)[:, None] + np.arange(steps)
        seen = np.pad(visible, ((0, 0), (0, steps)), constant_values=True)[:, None, :]
        for i, kind in enumerate(self.action["layer_types"]):
            layer = within(w, f"layers.{i}.")
            y, gate = modulated(x, linear(c, w, f"input_time_modulators.{i}"), eps)
            q, k, v = queries_keys_values(y, layer, self.action, kind, positions)
            k = np.concatenate([real(prefix_kv[i][0]), k], axis=2)
            v = np.concatenate([real(prefix_kv[i][1]), v], axis=2)
            y = linear(attend(q, k, v, scale, seen), layer, "self_attn.o_proj")
            x = x + rms_norm(y, layer["post_attention_layernorm.weight"], eps) * gate
            y, gate = modulated(x, linear(c, w, f"mlp_time_modulators.{i}"), eps)
            y = gated_mlp(y, layer)
            x = x + rms_norm(y, layer["post_feedforward_layernorm.weight"], eps) * gate
        x, _ = modulated(x, linear(c, w, "final_time_modulator"), eps)
        return linear(x, self.w, "action_out_proj")

    def _batch_prefix(self, batch: Batch) -> KeysValues:
        rest = (batch.get(k) for k in ("attention_mask", "token_type_ids", "pixel_values"))
        return self.prefix(batch["input_ids"], *rest)

    def per_sample_loss(self, batch: Batch, noise: Any, time: Any) -> Array:
        """Mean squared velocity error over the valid elements of each sample, [B].

        A sample without any valid element counts zero. Dimensions that are valid nowhere in a
        sample are zeroed in the noisy action; other invalid elements stay in it.
        """
        action, noise, t = real(batch["action"]), real(noise), real(time).reshape(-1, 1, 1)
        given = batch.get("action_mask")
        mask = np.broadcast_to(True if given is None else np.asarray(given) != 0, action.shape)
        x_t = (t * noise + (1.0 - t) * action) * mask.any(axis=1, keepdims=True)
        kv = self._batch_prefix(batch)
        v = self.velocity(x_t, time, kv, batch["input_ids"], batch.get("attention_mask"))
        errors = np.where(mask, (v - (noise - action)) ** 2, 0.0).sum(axis=(1, 2))
        return errors / np.maximum(mask.sum(axis=(1, 2)), 1)

    def loss(self, batch: Batch, noise: Any, time: Any) -> float:
        """Mean of the per-sample losses."""
        return float(self.per_sample_loss(batch, noise, time).mean())

    def sample(self, batch: Batch, noise: Any, steps: int, action_mask: Any = None) -> Array:
        """Integrate from noise at time 1 to an action at time 0 in equal Euler steps, [B, T, D].

        The mask multiplies the state before each step, so the last update of the masked
        dimensions remains in the result.
        """
        kv = self._batch_prefix(batch)
        x, time, dt = real(noise), 1.0, -1.0 / steps
        for _ in range(steps):
            x = x if action_mask is None else x * real(action_mask)
            v = self.velocity(x, time, kv, batch["input_ids"], batch.get("attention_mask"))
            x, time = x + v * dt, time + dt
        return x
