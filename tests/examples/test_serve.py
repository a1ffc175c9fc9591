"""The serving example, as its readers run it."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_serving_gives_the_answers_of_a_full_recompute(capsys):
    module = runpy.run_path(str(EXAMPLES / "serve.py"))
    server = module["main"]()
    assert "equal to the full recompute" in capsys.readouterr().out
    assert module["compilations"] == ["step"]
    # it shows what it is meant to show: pages run out, are used again, and are copied where they are shared
    assert server.put_off > 0 and server.copies >= 16
    assert server.tokens > 2 * module["PAGES"] * module["PAGE_SIZE"]
    assert server.allocator.sequences == (server.system.sequence,)
    assert server.allocator.free_pages == module["PAGES"] - 3
