"""The table in tests/README.md: complete, and every test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
README = (TESTS / "README.md").read_text(encoding="utf-8")
REPORTS = {
    "STALE": (1, 3, 4, 5, 7, 8, 10),
    "ZERO": (11, 13, 14, 15, 16, 18),
    "CAP": (19, 20, 22, 23, 24, 25, 27),
    "PAD": (29, 31, 32, 34, 36, 37, 39, 40),
    "PFX": (42, 43, 45, 46, 47, 49, 50, 52, 54, 55, 57, 59),
    "PRE": (60, 62, 63, 64),
    "SPEC": (66, 68, 69, 70),
    "DT": (72, 74, 75),
    "INV": (77, 79, 80, 82, 83),
    "DP": (85, 86, 88, 89, 91, 92),
    "LEAK": (134, 136, 137, 139),
    "JAX": (140, 141, 143, 144, 146, 147, 149, 151),
}
ROWS = dict(re.findall(r"^\| ((?:inv|BR)[ -]\d+) \| [^|]+ \| (.+) \|$", README, re.M))


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


def test_every_invariant_and_report_has_one_line():
    wanted = [f"inv {n}" for n in range(1, 41)]
    wanted += [f"BR-{n:02d}" for numbers in REPORTS.values() for n in numbers]
    assert list(ROWS) == wanted
    assert len(re.findall(r"^\| (?:inv|BR)", README, re.M)) == len(wanted)


@pytest.mark.parametrize("number", ROWS)
def test_the_names_in_a_line_exist_or_it_says_why_there_are_none(number):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[number])
    for file, test in named:
        assert (TESTS / file).is_file(), file
        assert test in names_in(TESTS / file), f"{file} has no {test}"
    if not named:
        assert re.match(r"(Not yet|Does not apply)( yet)?: \w+", ROWS[number])


def test_a_number_in_a_tests_name_is_in_the_table():
    """Tests here name what they cover; none claims a number that the table does not credit to somebody."""
    for folder in ("state", "engine"):
        for path in (TESTS / folder).glob("test_*.py"):
            for test in names_in(path):
                for kind, number in re.findall(r"_(inv|br)(\d+)(?=_)", test):
                    if kind == "inv":
                        assert f"inv {int(number)}" in ROWS, test
                    else:
                        assert int(number) in range(1, 152), test
