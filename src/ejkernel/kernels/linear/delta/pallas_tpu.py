"""The delta rule on TPUs: the scans of linear attention, two of which solve for what they write."""

from ejkernel.kernels.linear.delta import scans
from ejkernel.kernels.linear.delta.spec import dimensions
from ejkernel.kernels.linear.pallas_tpu import Scans

DELTA_RULE = Scans(scans.forward, scans.backward, dimensions)
IMPLEMENTATION = DELTA_RULE.implementation(shared_residuals=False, residuals={"written": "B T H Dv"})
