"""`python -m ejkernel`: the command line."""

from ejkernel.cli.main import main

if __name__ == "__main__":
    main()
