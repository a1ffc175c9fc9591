"""The signatures of the public functions as `help()` shows them: an argument a line, and types by their short names."""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

# `jaxtyping.Float[jaxlib._jax.Array, 'B T']` is Float[Array, 'B T'], and `<class 'jax.numpy.float32'>` is float32
PACKAGES = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)")
CLASS = re.compile(r"<class '([^']+)'>")
# jax.typing.ArrayLike, which Python shows as what it stands for
ARRAY_LIKE = re.compile(r"Union\[Array, ndarray, [\w, ]*?(, NoneType)?\]")


class LongSignature(inspect.Signature):
    """Printed with one argument a line; all else is `inspect.Signature`'s."""

    def __str__(self) -> str:
        return self.format()

    def format(self, **_: Any) -> str:
        """Python's own `help` gives a width from 3.13 on; lines here are short."""
        lines, keyword_only = [], False
        for parameter in self.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
                keyword_only = True
                lines.append("*")
            lines.append(_short(str(parameter)))
        returned = _short(inspect.formatannotation(self.return_annotation))
        return "(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {returned}"


def _short(text: str) -> str:
    text = PACKAGES.sub("", CLASS.sub(r"\1", text))
    return ARRAY_LIKE.sub(lambda match: "ArrayLike | None" if match[1] else "ArrayLike", text)


def show_signatures(functions: Iterable[Callable[..., Any]]) -> None:
    """Gives functions the signatures that they have, in this form."""
    for function in functions:
        given = inspect.signature(function)
        long = LongSignature([*given.parameters.values()], return_annotation=given.return_annotation)
        function.__signature__ = long
