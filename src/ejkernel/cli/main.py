"""What the script `ejkernel` runs. It loads nothing itself: the commands load JAX, which takes seconds."""

from ejkernel.cli.interrupt import at_once, end_on_interrupt


def main() -> None:
    """The command line; Ctrl-C ends it from here on."""
    end_on_interrupt(_command)


def _command() -> None:
    with at_once():
        from ejkernel.cli.commands import app
    app()


if __name__ == "__main__":
    main()
