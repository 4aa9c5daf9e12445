import importlib.util
from pathlib import Path

import pytest

from layercast import config

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "settings.py"


@pytest.fixture(scope="module")
def settings():
    spec = importlib.util.spec_from_file_location("settings", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_says_what_config_says(settings):
    assert settings.PAGE.read_text() == settings.page(), "run python scripts/settings.py"


def test_every_setting_has_a_row_with_its_default_and_what_it_is(settings):
    rows = [line.strip("| ").split(" | ") for line in settings.page().splitlines() if line.startswith("| `")]
    assert sorted(name.strip("`") for name, _, _ in rows) == sorted(config.KNOWN)
    assert all(default.strip("`") and told.endswith(".") for _, default, told in rows)
    (window,) = (row for row in rows if row[0] == "`layerwise_window`")
    assert window[1:] == ["`1`", "Layers moved and signalled together (1 = pure layerwise)."]


def test_what_is_written_as_a_default_is_read_as_the_default(settings):
    rows = [line.strip("| ").split(" | ") for line in settings.page().splitlines() if line.startswith("| `")]
    written = {name.strip("`"): default.strip("`").strip('"') for name, default, _ in rows if default.startswith("`")}
    assert len(written) == len(config.KNOWN) - 1  # host_bytes goes with the machine
    assert config.from_mapping(written) == config.Config()
