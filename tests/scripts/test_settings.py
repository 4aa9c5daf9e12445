from pathlib import Path

import pytest

from layercast import config

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "settings.py"


@pytest.fixture(scope="module")
def settings(module_of):
    return module_of(SCRIPT)


@pytest.fixture
def rows(settings):
    return [line.strip("| ").split(" | ") for line in settings.page().splitlines() if line.startswith("| `")]


def test_the_page_of_settings_says_what_config_says(settings):
    assert settings.PAGE.read_text() == settings.page(), "run python scripts/settings.py"


def test_every_setting_has_a_row_with_its_default_and_what_it_is(rows):
    assert sorted(name.strip("`") for name, _, _ in rows) == sorted(config.KNOWN)
    assert all(default.strip("`") and told.endswith(".") for _, default, told in rows)
    (window,) = (row for row in rows if row[0] == "`layerwise_window`")
    assert window[1:] == ["`1`", "Layers moved and signalled together (1 = pure layerwise)."]


def test_what_is_written_as_a_default_is_read_as_the_default(rows):
    written = {name.strip("`"): default.strip("`").strip('"') for name, default, _ in rows if default.startswith("`")}
    assert len(written) == len(config.KNOWN) - 1  # host_bytes goes with the machine
    assert config.from_mapping(written) == config.Config()
