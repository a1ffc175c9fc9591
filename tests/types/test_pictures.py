"""Pictures of masks and block patterns."""

import xml.etree.ElementTree as ET

import jax
import numpy as np
import pytest

from ejkernel.types import BlockPattern, MaskInfo

CAUSAL = MaskInfo(8, 8).apply_causal()


def cells(svg):
    """What an SVG shows: shares (rows, columns)."""
    tree = ET.fromstring(svg)
    _, _, columns, rows = map(int, tree.attrib["viewBox"].split())
    fractions = np.zeros((rows, columns))
    for shape in tree.findall("{http://www.w3.org/2000/svg}rect"):
        if shape.get("fill") != "none":
            x, y, width = (int(shape.attrib[name]) for name in ("x", "y", "width"))
            fractions[y, x : x + width] = float(shape.get("fill-opacity", 1))
    return fractions


def test_text():
    picture = MaskInfo.from_segments([1, 1, -1]).apply_causal().visualize()
    assert picture.splitlines()[1:] == ["█··", "██·", "···"]
    coarse = MaskInfo(1000, 2000).apply_causal().visualize(max_cells=4)
    assert coarse.splitlines()[1:] == ["██▒·", "██▒·", "███▒", "███▒"]
    heads = MaskInfo.from_attention_mask(np.stack([np.zeros((2, 2)), np.ones((2, 2))]).astype(bool)[None])
    assert heads.visualize(head=1).splitlines()[1:] == ["██", "██"]
    with pytest.raises(ValueError, match="head=2"):
        heads.visualize(head=2)
    with pytest.raises(ValueError, match="kind must be 'text', 'svg' or 'figure', got 'png'"):
        heads.visualize("png")  # pyright: ignore[reportArgumentType]


def test_figure():
    figure = CAUSAL.visualize("figure")
    assert figure.axes[0].images[0].get_array().shape == (8, 8)
    figure = BlockPattern.sliding_blocks(5, 1).visualize("figure")
    assert figure.axes[0].images[0].get_array().shape == (5, 5) and figure.axes[0].get_xlabel() == "key block"


def test_svg_shows_what_is_seen():
    np.testing.assert_array_equal(cells(CAUSAL.visualize("svg")), np.tril(np.ones((8, 8))))
    ids = MaskInfo.from_segments([[0, 0, 1, 1, 1, -1]])
    np.testing.assert_array_equal(cells(ids.visualize("svg")), np.asarray(ids.attention_mask[0, 0]))
    coarse = cells(MaskInfo(1000, 1000).apply_causal().visualize("svg", max_cells=10))
    assert coarse.shape == (10, 10) and (np.diag(coarse) < 1).all() and (np.diag(coarse) > 0.5).all()


def test_patterns():
    pattern = BlockPattern.local_stride(4, 6, local_blocks=2, vert_stride=3, block_size=16)
    for head in range(4):
        drawn = cells(pattern.visualize("svg", head=head))
        np.testing.assert_array_equal(drawn, np.asarray(pattern.dense[head]))
    alike = BlockPattern.local_stride(4, 6, local_blocks=2, vert_stride=3, homo_head=True)
    assert alike.visualize(head=3).splitlines()[1:] == alike.visualize(head=0).splitlines()[1:]
    many = BlockPattern.sliding_blocks(100, 1)
    assert cells(many.visualize("svg", max_cells=10)).shape == (10, 10)
    for picture in (pattern.visualize, alike.visualize):
        with pytest.raises(ValueError, match="head=4 must lie within the pattern's"):
            picture(head=4)


def test_notebooks_show_a_picture():
    for thing in (CAUSAL, BlockPattern.sliding_blocks(4, 1)):
        shown = thing._repr_html_()
        assert repr(thing) in shown and "<svg" in shown
    heads = BlockPattern.local_stride(8, 4, local_blocks=1, vert_stride=2)
    assert heads._repr_html_().count("<svg") == 4


def test_notebooks_show_the_repr_of_what_cannot_be_drawn():
    told = []

    @jax.jit
    def traced(mask, pattern):
        told.extend([mask._repr_html_(), pattern._repr_html_()])
        with pytest.raises(ValueError, match="a picture needs concrete blocks, these are traced"):
            pattern.visualize()
        return mask.q_positions

    traced(MaskInfo.from_segments([1, 1, 2]), BlockPattern.from_dense(np.eye(3, dtype=bool)))
    mesh = jax.make_mesh((1,), ("dp",))
    told.append(MaskInfo.from_segments([1, 1, 2]).get_shardings(mesh=mesh)._repr_html_())
    told.append(MaskInfo(2**17, 2**17)._repr_html_())
    assert told == [None] * 4
