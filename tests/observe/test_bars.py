import pytest

from layercast.errors import Refused
from layercast.observe.bars import Bars, figure_of, write_bars

pytest.importorskip("matplotlib")
SIDES = {"floor": 1.0, "layercast": 2.0, "lmcache": 3.0}


@pytest.mark.parametrize("names", [["floor", "layercast", "lmcache"], ["layercast"], ["floor", "lmcache"]])
def test_every_colour_of_a_picture_is_named_in_it_and_no_other(names):
    panel = Bars("one", "ms", {name: SIDES[name] for name in names}, "floor")
    figure = figure_of([panel, panel], "a title", ("layercast",), "what can't be beaten")
    (legend,) = figure.legends
    words = {"floor": "what can't be beaten", "layercast": "layercast", "lmcache": "others"}
    assert {text.get_text() for text in legend.get_texts()} == {words[name] for name in names}
    colours = {patch.get_facecolor() for ax in figure.axes for patch in ax.patches}
    assert {patch.get_facecolor() for patch in legend.get_patches()} == colours


def test_a_picture_is_written_and_of_nothing_refused(tmp_path):
    write_bars([Bars("one", "ms", SIDES)], tmp_path / "b.png", "a title", ["layercast"])
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(Refused, match="nothing to draw"):
        write_bars([], tmp_path / "c.png", "a title", ["layercast"])
