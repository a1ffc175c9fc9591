"""The command line with the toy family: `PYTHONPATH=tests python -m toy_family verify`, say."""

from ejkernel.cli.main import main
from ejkernel.ops import register_families

if __name__ == "__main__":
    register_families("toy_family")
    main()
