"""Numbers as people read them: three digits, and metres as millimetres."""

import math

MISSING = "–"

Number = int | float


def display_unit(unit: str) -> tuple[str, float]:
    """The unit to show and the factor into it."""
    return ("mm", 1000.0) if unit == "m" else (unit, 1.0)


def format_number(value: Number) -> str:
    """Three significant digits, in plain notation where that is readable."""
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if 1e-3 <= abs(value) < 1e5:
        # 9.996 and 10.0 need different numbers of decimals; rounding first tells them apart.
        rounded = float(f"{value:.3g}")
        return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"
    return f"{value:.3g}"
