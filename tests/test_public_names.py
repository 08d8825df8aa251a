"""The names that users build on: adding or dropping one is a decision, made here too."""

import importlib
import inspect
import subprocess
import sys

import pytest

PUBLIC = {
    "jaxstate": """
        LM BlockPool BlockTables CacheSpec CapacityError CheckpointError Completion Engine Event
        GroupSpec JaxstateError OwnershipError PlanError Request RequestError SamplingParams
        Sequences Sizes Snapshot SnapshotError SpecError StateCache Tokenizer explain load_model
    """,
    "jaxstate.state": "BlockPool BlockTables CacheSpec Cells GroupSpec Snapshot StateCache",
    "jaxstate.models": """
        CausalLM FAMILIES Mamba2Config Mamba2LM MambaConfig MambaLM from_random load_model
        parse_config save_model
    """,
    "pallas_kernels": """
        Columns RowIds Rows causal_conv conv_step copy_blocks fill_blocks prefer
        projected_conv_step read_blocks rms_norm rows_matmul selective_scan selective_step sliced
        split ssd ssd_step write_blocks
    """,
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_these(module):
    assert sorted(importlib.import_module(module).__all__) == sorted(PUBLIC[module].split())


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there_and_says_what_it_is(module):
    package = importlib.import_module(module)
    assert package.__doc__
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), f"{module}.{name} has no docstring"


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("jaxstate").nothing  # noqa: B018


def test_importing_the_package_imports_no_jax():
    code = "import sys, jaxstate; assert 'jax' not in sys.modules; assert 'LM' in dir(jaxstate)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
