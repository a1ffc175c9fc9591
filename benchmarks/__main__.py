"""`python -m benchmarks`, in a checkout. Ctrl-C ends it from here on."""

from ejkernel.cli.interrupt import at_once, end_on_interrupt


def _command() -> None:
    with at_once():
        from benchmarks.command_line import make_app

        app = make_app()
    app(prog_name="python -m benchmarks")


if __name__ == "__main__":
    end_on_interrupt(_command)
