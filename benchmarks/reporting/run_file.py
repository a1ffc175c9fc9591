"""Whether what a file holds is a run, as `report.new_run` and `Result` make one: checked once, where it is read."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.measuring.benchmark import UNITS

STATUSES = ("ok", "wrong", "refused", "failed", "skipped")


class Kind(NamedTuple):
    """What a value has to be: in words for the error, and as a check."""

    need: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """NaN is one, and infinity; an integer that no float can hold is none."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.need} or null", lambda value: value is None or kind.fits(value))


def _one_of(names: tuple[str, ...]) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda value: _is_text(value) and value in names)


def _each(kind: Kind, plural: str) -> Kind:
    """An object whose values are all of a kind."""
    return Kind(f"an object of {plural}", lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())))


TEXT = Kind("a text", _is_text)
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value)))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
SIZE = Kind("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool))
NUMBER = Kind("a number", _is_number)
AMOUNT = Kind("a finite number of at least 0", lambda value: _is_number(value) and 0 <= value < float("inf"))
TIME = Kind("a finite number above 0", lambda value: AMOUNT.fits(value) and value > 0)

RUN = {
    "benchmark": TEXT,
    "date": TEXT,
    "machine": OBJECT,
    "contenders": _each(_or_null(TEXT), "texts and nulls"),
    "missing": _each(TEXT, "texts"),
    "cases": OBJECT,
    "complete": FLAG,
    "results": LIST,
}
CASE = {"group": TEXT, "unit": _one_of(tuple(UNITS)), "auto": _each(_or_null(TEXT), "texts and nulls")}
# by what cases are sorted, where they have it
SIZES = ("D", "T")
RESULT = {
    "case": TEXT,
    "what": TEXT,
    "contender": TEXT,
    "status": _one_of(STATUSES),
    "reason": TEXT,
    "milliseconds": _or_null(AMOUNT),
    "rate": _or_null(AMOUNT),
    "first_call_seconds": _or_null(AMOUNT),
    "temporary_megabytes": _or_null(AMOUNT),
    "errors": OBJECT,
    "tuning": _or_null(OBJECT),
}
ERROR = {"error": NUMBER, "limit": NUMBER}  # of an answer with NaN the error is NaN
TUNING = {"operations": TEXTS, "bucket": TEXT, "platform": TEXT, "config": _or_null(OBJECT)}


def check_run(run: Any) -> None:
    """`ValueError` says what is not as it should be."""
    _check_has("it", run, RUN)
    machine = run["machine"]
    _check_has("machine", machine, {"device": TEXT} | {name: AMOUNT if name == "load" else TEXT for name in machine})
    for name, facts in run["cases"].items():
        _check_has(f"case {name!r}", facts, CASE)
        _check_has(f"case {name!r}", facts, {size: SIZE for size in SIZES if size in facts})
    for number, result in enumerate(run["results"], 1):
        _check_result(f"result {number}", result, run)


def _check_result(where: str, result: Any, run: dict[str, Any]) -> None:
    _check_has(where, result, RESULT)
    for field, known in (("case", run["cases"]), ("contender", run["contenders"])):
        if result[field] not in known:
            raise ValueError(f"{where}: the {field} {_shown(result[field])} is none of its {field}s")
    facts = run["cases"][result["case"]]
    if result["what"] not in facts["auto"]:
        raise ValueError(f"{where}: of the pass {_shown(result['what'])} case {result['case']!r} does not say its auto")
    if result["status"] == "ok":
        rated = {} if facts["unit"] == "ms" else {"rate": AMOUNT}
        _check_has(where, result, {"milliseconds": TIME, **rated})
    for name, error in result["errors"].items():
        _check_has(f"{where}: the error of {name!r}", error, ERROR)
    if result["tuning"] is not None:
        _check_has(f"{where}: tuning", result["tuning"], TUNING)


def _check_has(where: str, value: Any, kinds: Mapping[str, Kind]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shown(value)}, not {OBJECT.need}")
    if absent := [name for name in kinds if name not in value]:
        raise ValueError(f"{where} has no {', '.join(absent)}")
    for name, kind in kinds.items():
        if not kind.fits(value[name]):
            raise ValueError(f"{where}: {name} is {_shown(value[name])}, not {kind.need}")


# short, and on one line
_shown = reprlib.repr
