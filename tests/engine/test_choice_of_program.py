"""Which program runs a plan: a GPU has one more, for rows that ask for top-k, top-p or min-p."""

from types import SimpleNamespace

import pytest

from jaxstate import programs
from jaxstate.request import SamplingParams

GPU, CPU = ("prefill", "decode", "decode_filtered"), ("prefill", "decode")


@pytest.mark.parametrize(
    ("kind", "rows", "kinds", "program"),
    [
        ("decode", [None, {"temperature": 1.0}], GPU, "decode"),
        ("decode", [{"temperature": 1.0, "top_k": 3}, None], GPU, "decode_filtered"),
        ("decode", [{}, {"temperature": 0.5, "top_p": 0.9}], GPU, "decode_filtered"),
        ("decode", [{"temperature": 0.5, "min_p": 0.1}], GPU, "decode_filtered"),
        ("decode", [{"top_k": 3}], GPU, "decode"),  # greedy: nothing is drawn
        ("decode", [{"temperature": 1.0, "top_k": 3}], CPU, "decode"),
        ("prefill", [{"temperature": 1.0, "top_k": 3}], GPU, "prefill"),
    ],
)
def test_the_program_follows_from_what_the_rows_ask_for(kind, rows, kinds, program):
    serves = tuple(
        row
        if row is None
        else SimpleNamespace(request=SimpleNamespace(sampling=SamplingParams(**row)))
        for row in rows
    )
    assert programs.of(SimpleNamespace(kind=kind, serves=serves), kinds) == program


def test_a_release_of_xla_without_an_option_compiles_without_it():
    class Lowered:
        def compile(self, compiler_options=None):
            if compiler_options:
                raise programs.jax.errors.JaxRuntimeError("No such compile option: 'x'")
            return "program"

    assert programs.compiled(Lowered(), {"x": False}) == "program"
