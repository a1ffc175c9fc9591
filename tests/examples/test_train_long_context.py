"""The example of long sequences: the losses of many devices are those of one."""

import runpy
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_long_context.py"


def test_eight_devices_lose_as_one_does():
    module = runpy.run_path(str(EXAMPLE))
    devices = np.asarray(jax.devices("cpu")[:8])
    given = {"batch": 2, "length": 64, "steps": 8}
    many = module["train"](Mesh(devices.reshape(2, 4), ("data", "sequence")), **given)
    one = module["train"](Mesh(devices[:1].reshape(1, 1), ("data", "sequence")), **given)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert many[-1] < many[0]
