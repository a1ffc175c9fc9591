"""The command line: what it prints and how it exits."""

import io
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

import ejkernel
from ejkernel import modules
from ejkernel.cli import screen
from ejkernel.cli.commands import _outcome_table, app
from ejkernel.cli.families import families, known_functions
from ejkernel.cli.verify import Outcome, platforms_for, verify
from ejkernel.family import Error
from ejkernel.kernels.pooling import checks as pooling_checks
from ejkernel.kernels.pooling import family as pooling
from ejkernel.kernels.softmax import family as softmax
from ejkernel.kernels.softmax.checks import attention
from ejkernel.ops import PLATFORMS, get_operation, list_operations

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("info", "verify", "explain", "tune", "support", "roofline"):
        assert command in result.output


def test_short_help_and_version():
    for short, long in (("-h", "--help"), ("-V", "--version")):
        assert run(short).exit_code == 0 and run(short).output == run(long).output
    assert run("-V").output == f"ejkernel {ejkernel.__version__}\n"
    assert run("explain", "-h").output == run("explain", "--help").output
    assert "--install-completion" in run("-h").output


def test_help_says_which_family_means_what():
    """Sentences of several families are not run together; a default is that of all, or says whose it is."""
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run("explain", "--help").output).split())
    assert "softmax, ring: Keys; default: the length. paged: Of a cache, keys of a sequence at most." in shown
    assert "softmax, paged, ring: Default: as many as query heads. native_sparse: Key heads; default: a" in shown
    assert "(default: 1024; native_sparse: 4096)" in shown and "(default: paged: 16; native_sparse: 64)" in shown
    assert "Head dimension of values; default: of keys." in shown  # the same of all


@pytest.mark.parametrize(
    ("typed", "offered", "others"),
    [
        ("explain fl", {"flash_attention"}, set()),
        ("support mean", {"mean_pooling"}, set()),
        ("verify flash_attention mean", {"mean_pooling"}, set()),
        ("tune so", {"softmax"}, set()),
        ("tune sc", {"scaled_dot_product_attention"}, set()),
        ("roofline ", {"softmax", "paged", "linear"}, {"pooling"}),
        ("explain flash_attention --device v5", {"v5e", "v5p"}, {"h200"}),
        ("explain flash_attention --platform ", set(PLATFORMS), set()),
        ("tune flash_attention --platform cu", {"cudnn", "cute"}, {"xla"}),
    ],
)
def test_a_shell_completes_operations_families_platforms_and_devices(typed, offered, others):
    environment = {"_EJKERNEL_COMPLETE": "complete_bash", "COMP_WORDS": f"ejkernel {typed}"}
    environment["COMP_CWORD"] = str(len(typed.split(" ")))
    completed = CliRunner().invoke(app, [], prog_name="ejkernel", env=environment).output.split()
    assert offered <= {*completed} and not others & {*completed}, completed


@pytest.mark.parametrize(("columns", "width"), [("60", 60), (None, 240)])
def test_output_into_a_pipe_is_as_wide_as_columns_says(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert screen.console().width == width
    lines = run("explain", "flash_attention", "--length", "64").output.splitlines()
    assert max(map(len, lines)) <= width


def test_python_runs_it_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ejkernel", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"ejkernel {ejkernel.__version__}\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("explian flash_attention", "explain"),
        ("explain flash_attention --lenght 4", "--length"),
        ("explain flash_atention", "flash_attention"),
        ("explain flash_attention --device h20", "h200"),
        ("support flash_atention", "flash_attention"),
        ("tune flash_atention", "flash_attention"),
    ],
)
def test_a_slip_is_told_what_is_meant(command, meant):
    result = run(*command.split())
    shown = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and re.search(rf"([Dd]id you mean|Possible options:).* '?{meant}", shown), shown


def test_info_names_devices_versions_and_every_platform():
    result = run("info")
    assert result.exit_code == 0, result.output
    assert jax.__version__ in result.output
    for word in ("devices", "triton", "pallas", "cudnn", "flash_attention"):
        assert word in result.output


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")
def test_info_says_why_platforms_do_not_work_here():
    from ejkernel.cli.info import platforms

    found = platforms()
    assert set(found["xla"].operations) == {name for name in list_operations() if get_operation(name).implementations}
    for name in ("triton", "pallas", "cudnn"):
        assert found[name].operations == []
        (reason,) = found[name].reasons  # once, however many operations say it
        assert "needs an NVIDIA GPU" in reason


# verify -----------------------------------------------------------------------------------------------------


def all_checks():
    return [check for family in families().values() for check in family.checks()]


def test_every_function_has_checks():
    assert {check.operation for check in all_checks()} == set(known_functions()) >= set(list_operations())


def test_every_check_can_run_here():
    assert all(platforms_for(check)[0] for check in all_checks())


def test_verify_passes_here():
    # the one that is quick to compile; the shared tests check all operations far more closely
    result = run("verify", "mean_pooling")
    assert result.exit_code == 0, result.output
    assert "checks passed" in result.output
    assert result.output.count(" ok ") >= 2


OTHER = attention("other", "B1 T8 H1 D4", dtype="float32", operation="scaled_dot_product_attention")
SMALL = attention("small", "B1 T24 H2 D8", dtype="float32", causal=True)
POOLED = pooling_checks.check("pooled", (1, 8, 1, 4), "float32", chunk_size=4)


def only(monkeypatch, *checks, **others):
    """Some checks alone, and perhaps other functions in the place of public ones."""
    functions = dict(softmax.FAMILY.functions)
    for name, function in others.items():
        functions[name] = replace(functions[name], where=function)
    monkeypatch.setattr(softmax, "FAMILY", replace(softmax.FAMILY, checks=lambda: [*checks], functions=functions))
    monkeypatch.setattr("ejkernel.families._FAMILIES", ["ejkernel.kernels.softmax"])


def scaled_output(query, key, value, **options):
    return 1.01 * modules.flash_attention(query, key, value, **options)


def lost_gradient(query, key, value, **options):
    return modules.flash_attention(jax.lax.stop_gradient(query), key, value, **options)


def nan_output(query, key, value, **options):
    return modules.flash_attention(query, key, value, **options) + jax.numpy.nan


@pytest.mark.parametrize("wrong", [scaled_output, lost_gradient, nan_output])
def test_verify_exits_with_1_on_a_wrong_answer(monkeypatch, wrong):
    only(monkeypatch, SMALL, flash_attention=wrong)
    result = run("verify")
    assert result.exit_code == 1
    assert "1 of 1 checks failed" in result.output and "FAILED" in result.output


def test_verify_reports_a_crash_and_goes_on(monkeypatch):
    def broken(query, key, value, platform=None, **options):
        if platform is not None:
            raise NotImplementedError("the kernel is on fire")
        return modules.flash_attention(query, key, value, **options)

    only(monkeypatch, SMALL, OTHER, flash_attention=broken)
    result = run("verify")
    assert result.exit_code == 1
    assert "the kernel is on fire" in result.output
    assert "1 of 2 checks failed" in result.output


def test_verify_compiles_side_by_side_and_shows_it_in_order(monkeypatch):
    """Each waits until the other is traced, and the first until the other's outcome is told."""
    both, told = Barrier(2, timeout=60), Event()

    def first(query, key, value, platform=None, **options):
        if platform is not None:
            both.wait()
            assert told.wait(60)
        return modules.flash_attention(query, key, value, platform=platform, **options)

    def second(query, key, value, platform=None, **options):
        if platform is not None:
            both.wait()
        return modules.scaled_dot_product_attention(query, key, value, platform=platform, **options)

    def telling(work, checked):
        def tell(outcome):
            checked(outcome)
            told.set()

        return verify(work, tell)

    only(monkeypatch, SMALL, OTHER, flash_attention=first, scaled_dot_product_attention=second)
    monkeypatch.setattr("ejkernel.cli.verify.os.cpu_count", lambda: 4)
    monkeypatch.setattr("ejkernel.cli.verify.verify", telling)
    result = run("verify", "--platform", "xla")
    assert result.exit_code == 0, result.output
    lines, shown = result.output.split("Against the definition")
    assert re.findall(r"^\w+, (\w+), xla: ok$", lines, re.MULTILINE) == ["other", "small"]
    assert re.findall(r"^ *(\w+) +xla ", shown, re.MULTILINE) == ["small", "other"]


def test_verify_takes_times_when_nothing_is_compiled_any_more(monkeypatch):
    """The peer of the last check among it, which nobody else waits for."""
    compiling = []

    def slow_peer(call):
        compiling.append(call)
        time.sleep(0.5)
        compiling.remove(call)
        return call["query"]

    def median_seconds(*_, repeats):
        assert not compiling
        return 1.0

    only(monkeypatch, SMALL, replace(OTHER, peer=slow_peer))
    monkeypatch.setattr("ejkernel.cli.verify.median_seconds", median_seconds)
    result = run("verify", "--platform", "xla")
    assert result.exit_code == 0, result.output
    assert result.output.count("1000.0 ms") == 2 and result.output.count("1.0x") == 2


def failing(*_):
    raise KeyError("no such block")


@pytest.mark.parametrize("what", ["definition", "peer"])
def test_verify_reports_what_else_fails(monkeypatch, what):
    only(monkeypatch, replace(SMALL, **{what: failing}), OTHER)
    result = run("verify", "--platform", "xla")
    assert result.exit_code == 1
    assert "1 of 2 checks failed" in result.output and "FAILED" in result.output
    during = "while it was timed: " if what == "peer" else ""
    assert f"flash_attention, small, xla: {during}KeyError: 'no such block'" in result.output


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU")
def test_verify_of_a_platform_that_is_not_here_says_why(monkeypatch):
    only(monkeypatch, SMALL)
    result = run("verify", "--platform", "cudnn")
    assert result.exit_code == 1
    assert "needs an NVIDIA GPU" in result.output
    assert "nothing could be checked" in result.output


def test_names_in_the_table_are_whole():
    """At 110 columns, every case with the widest numbers there may be."""
    error = Error(1.234e-3, 1.2e-5, 2e-3)
    outcomes = [Outcome(check, "pallas", error, error, 1.2345, 12.345) for check in all_checks()]
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(_outcome_table(outcomes))
    shown = [" ".join(line.split()) for line in console.export_text().splitlines()]
    for check in all_checks():
        assert check.operation in shown
        assert f"{check.name} pallas {check.dtype} 1.2e-03 102.8x 1.2e-03 102.8x 1234.5 ms 10.0x ok" in shown


def test_verify_refuses_unknown_names():
    operation, platform = run("verify", "flesh_attention"), run("verify", "--platform", "abacus")
    assert operation.exit_code == platform.exit_code == 2
    assert "unknown operation 'flesh_attention'; did you mean" in operation.output
    assert "unknown platform 'abacus'" in platform.output


def test_verify_of_chosen_operations(monkeypatch):
    monkeypatch.setattr(pooling, "FAMILY", replace(pooling.FAMILY, checks=lambda: [POOLED]))
    result = run("verify", "mean_pooling")
    assert result.exit_code == 0, result.output
    assert "all 1 checks passed" in result.output


# explain ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")
@pytest.mark.parametrize("operation", list_operations())
def test_explain_on_a_cpu_says_why_the_others_do_not_run(operation):
    result = run("explain", operation)
    assert result.exit_code == 0, result.output
    assert "xla" in result.output
    if made_of := get_operation(operation).made_of:
        assert all(f"{operation} > {name}" in result.output for name in made_of)
        return
    has = get_operation(operation).implementations
    others = [platform for platform in PLATFORMS if platform != "xla"]
    assert result.output.count("needs an NVIDIA GPU") == sum(platform in has for platform in others)
    assert result.output.count(f"{operation} has no ") == sum(platform not in has for platform in others)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")
@pytest.mark.parametrize("forced", ["triton", "pallas", "cudnn"])
def test_explain_of_a_forced_platform_gives_the_reasons_the_call_raises_with(forced):
    result = run("explain", "flash_attention", "--length", "32", "--platform", forced)
    assert result.exit_code == 1
    x = jax.numpy.ones((1, 32, 8, 64), jax.numpy.bfloat16)
    with pytest.raises(NotImplementedError, match=f"platform '{forced}' cannot do this call") as raised:
        modules.flash_attention(x, x, x, platform=forced)
    reasons = re.findall(rf"^  {forced}: (.*)$", str(raised.value), re.MULTILINE)
    assert reasons
    for reason in reasons:
        assert reason in result.output
    assert "platforms that could: xla" in result.output


@pytest.mark.parametrize(
    "options",
    [
        "--batch 2 --length 4096 --heads 8 --kv-heads 2 --dim 64 --dtype bfloat16 --causal --window 128,0",
        "--length 64 --kv-length 128 --value-dim 32 --bias --sinks --soft-cap 30 --lse",
        "--length 64 --documents 4 --dropout 0.1 --dtype float32 --window 8",
    ],
)
def test_explain_takes_every_option_of_flash_attention(options):
    result = run("explain", "flash_attention", *options.split())
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("flesh_attention", "unknown operation"),
        ("flash_attention --chunk-size 4", "has no chunk_size"),
        ("flash_attention --block-size 4", "has no block_size"),
        ("scaled_dot_product_attention --sinks", "has no softmax_aux"),
        ("mean_pooling --causal", "has no causal"),
        ("mean_pooling --bias", "has no bias"),
        ("flash_attention --window wide", "must be a number or left,right"),
        ("flash_attention --heads 8 --kv-heads 3", "must be a multiple of key heads"),
        ("flash_attention --dtype float64", "not supported; use one of float32"),
        ("flash_attention --platform abacus", "is unknown"),
        ("flash_attention --documents 2 --kv-length 2048", "pack queries and keys alike"),
        ("flash_attention --documents 101 --length 100", "documents=101 do not fit into length=100: each has at least"),
        ("gla_attention --documents 5000 --length 100", "documents=5000 do not fit into length=100: each has at least"),
    ],
)
def test_explain_ignores_nothing(command, message):
    result = run("explain", *command.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_explain_of_a_device_that_is_not_here():
    for device, kind, platform in (("h200", "nvidia_h200", "triton"), ("v6e", "tpu_v6_lite", "pallas")):
        result = run("explain", "gla_attention", "--length", "256", "--device", device)
        assert result.exit_code == 0, result.output
        assert f"gla_attention on {kind}: {platform} (" in result.output
        told = ejkernel.explain(
            ejkernel.gla_attention, *[jax.ShapeDtypeStruct((1, 256, 8, 64), "bfloat16")] * 3, device=device
        )
        assert (told.platform, told.target.kind) == (platform, kind)
    assert ejkernel.ops.device_kind() != "tpu_v6_lite"
    result = run("explain", "flash_attention", "--device", "H200")  # which has every package
    assert result.exit_code == 0 and "not installed" not in result.output
    assert "why not" not in result.output  # no table of nothing
    result = run("explain", "ring_attention", "--device", "h200")
    assert "forward: )" not in result.output and "devices along ('sp',): " in result.output
    result = run("explain", "flash_attention", "--device", "V5e", "--platform", "triton")
    assert result.exit_code == 1 and "needs an NVIDIA GPU, this call is for tpu" in result.output


def commands_in(readme: Path) -> list[str]:
    return re.findall(r"ejkernel (explain [^`#\n]*)", readme.read_text())


@pytest.mark.parametrize(
    "command", [c for p in (ROOT / "README.md", *ROOT.glob("src/**/README.md")) for c in commands_in(p)]
)
def test_commands_in_the_readmes_run(command):
    result = run(*command.split())
    assert result.exit_code == 0, result.output


def test_roofline_of_a_family():
    result = run("roofline", "paged", "--batch", "2", "--width", "768")
    assert result.exit_code == 0 and result.output.startswith("A decode step over pages, 2 sequences of 4096 keys:\n|")
    for options, message in (
        ("--width 300", "width 300 must be a multiple of the head dims 64, 128, 256"),
        ("paged --width 192", "width 192 must be a multiple of the head dim, 128"),
        ("abacus", "abacus has no roofline; there are softmax, paged, linear"),
    ):
        result = run("roofline", *options.split())
        assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


def test_support_prints_the_table():
    result = run("support", "flash_attention")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("| feature |")
    assert run("support", "flesh_attention").exit_code == 2
