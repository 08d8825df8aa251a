"""The benchmarks of the prefill kernels give no speed to what they could not confirm."""

import dataclasses
import json

import pallas_kernels
from benchmarks import prefill, selective_scan
from pallas_kernels.cases import Case
from pallas_kernels.mosaic.config import ScanConfig
from tests.long import long

SIZES = {"D": 4, "N": 2}
RIGHT, WRONG = ScanConfig((32,)), ScanConfig((64,))


def call(operands, variant, **changes):
    """The reference; as the wrong variant it also writes a block that it was not given."""
    operands = {**operands, **changes}
    y, pool = pallas_kernels.selective_scan(**operands, implementation="reference")
    return (y, pool.at[0, 1].set(1.0)) if variant == WRONG else (y, pool)


def make_inputs(tokens, key):
    inputs = selective_scan.make_inputs(tokens, key)
    small = {name: inputs[name][:, :4] for name in ("x", "dt", "z")}
    small |= {name: inputs[name][:, :2] for name in "BC"}
    small |= {name: inputs[name][:4] for name in ("skip", "dt_bias")}
    return small | {"A": inputs["A"][:4, :2]}


@long
def test_a_variant_whose_check_fails_gets_no_time(tmp_path, monkeypatch):
    bench = dataclasses.replace(
        selective_scan.BENCH,
        call=call,
        make_inputs=make_inputs,
        block=(2, 4),
        shapes=((64,),),
        goals={(64,): 1},
        floor=lambda lengths: 1e-2,
        chosen=lambda lengths: RIGHT,
        tuning=(WRONG,),
        cases=(Case("selective_scan", SIZES, (3, 0, 5), 2, 1),),
        one_row=Case("selective_scan", SIZES, (704, 0, 0)),
        peers={},
    )
    path = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", ["benchmark", "--tune", "--ours", "-o", str(path)])
    assert prefill.main(bench, "A benchmark.") == 1
    right, wrong = json.loads(path.read_text())["results"]
    assert right["us"] > 0
    assert "us" not in wrong
    assert "does not name changed" in wrong["wrong"]
