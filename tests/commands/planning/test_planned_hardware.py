"""Hours become cost, energy and CO2 by what is known of price, power and grid."""

from __future__ import annotations

import pytest

from recipes_lib.commands.planning.planned_hardware import CURVE, Hardware, format_rows
from recipes_lib.planning.devices import choose_device


def build(price: float | None = None, pue: float = 1.0, grid: float | None = None, gpu: str = "H100") -> Hardware:
    return Hardware(choose_device(gpu), 8, 989e12, 0.5, "told", None, None, price, pue, grid)


def test_the_bill_is_hours_times_gpus_times_price_and_power() -> None:
    assert build().compute_hours(8 * 989e12 * 0.5 * 3600) == 1
    rows = dict(build(2.5, 1.2, 400).describe_bill(10))
    assert rows["cost"].startswith("200.00, at 2.5 for a GPU hour")
    # 8 boards of 700 W for 10 hours are 56 kWh.
    assert rows["energy"] == "at most 67.2 kWh: 700 W a board, PUE 1.2; 26.9 kg of CO2"


@pytest.mark.parametrize(("gpu", "names"), [("H100", ["energy"]), ("B300", [])])
def test_what_is_not_known_is_not_told(gpu, names) -> None:
    assert [name for name, _ in build(gpu=gpu).describe_bill(10)] == names


def test_rows_have_names_in_a_column_but_curves() -> None:
    assert format_rows([("time", "3 s"), ("", "more"), (CURVE, "xx")]) == [
        "time            3 s",
        "                more",
        "xx",
    ]
