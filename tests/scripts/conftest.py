import importlib.util

import pytest


@pytest.fixture(scope="module")
def module_of():
    """The module that a script is, by its path."""

    def loaded(script):
        spec = importlib.util.spec_from_file_location(script.stem, script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded
