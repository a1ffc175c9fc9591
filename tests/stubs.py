"""What type checkers see of functions whose result depends on an option: `python tests/stubs.py --write`.

An option such as `return_lse` makes an array a pair. A type checker learns of it from overloads, which repeat a
signature of 25 arguments three times: so they are made from the signature itself, into a stub beside its module.
`make tables` writes them, and a test compares.
"""

import ast
import copy
import subprocess
import sys
from pathlib import Path

MODULES = Path(__file__).resolve().parents[1] / "src" / "ejkernel" / "modules"
FLAGS = ("return_lse", "return_state", "return_residual")
# the type of the flag and of what is returned; last what is only known when it runs
OVERLOADS = (
    ("Literal[False]", True, "jax.Array"),
    ("Literal[True]", False, "tuple[jax.Array, jax.Array]"),
    ("bool", False, "jax.Array | tuple[jax.Array, jax.Array]"),
)


def flag_of(function: ast.FunctionDef) -> str | None:
    names = [argument.arg for argument in function.args.kwonlyargs]
    return next((flag for flag in FLAGS if flag in names), None)


def overload(function: ast.FunctionDef, flag: str, kind: str, default: bool, returns: str) -> ast.FunctionDef:
    made = copy.deepcopy(function)
    at = [argument.arg for argument in made.args.kwonlyargs].index(flag)
    made.args.kwonlyargs[at].annotation = ast.parse(kind, mode="eval").body
    if not default:
        made.args.kw_defaults[at] = None
    made.returns = ast.parse(returns, mode="eval").body
    made.decorator_list = [ast.Name("overload")]
    made.body = [ast.Expr(ast.Constant(...))]
    return made


def stub(path: Path) -> str | None:
    """The stub of a module of public functions; None where no function needs one."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not any(map(flag_of, functions)):
        return None
    body: list[ast.stmt] = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    body.insert(0, ast.ImportFrom("typing", [ast.alias("Literal"), ast.alias("overload")], 0))
    for function in functions:
        flag = flag_of(function)
        if flag is None:
            plain = copy.deepcopy(function)
            plain.body = [ast.Expr(ast.Constant(...))]
            body.append(plain)
        else:
            body += [overload(function, flag, *each) for each in OVERLOADS]
    text = f'"""Made by tests/stubs.py from {path.name}."""\n\n' + ast.unparse(
        ast.fix_missing_locations(ast.Module(body, []))
    )
    name = str(path.with_suffix(".pyi"))
    text = _ruff("check", "--fix", "--quiet", "--select=F401,F811,I", "--ignore=F722", text=text, name=name)
    return _ruff("format", text=text, name=name)


def _ruff(*command: str, text: str, name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, f"--stdin-filename={name}", "-"],
        input=text, capture_output=True, text=True, check=False, cwd=MODULES,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def stubs() -> dict[Path, str]:
    made = {path.with_suffix(".pyi"): stub(path) for path in sorted(MODULES.glob("*.py"))}
    return {path: text for path, text in made.items() if text is not None}


if __name__ == "__main__":
    for path, text in stubs().items():
        current = path.read_text() if path.exists() else ""
        print(f"{path.name}: {'current' if current == text else 'written' if '--write' in sys.argv else 'OLD'}")
        if "--write" in sys.argv:
            path.write_text(text)
