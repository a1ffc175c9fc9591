"""What every family's tests share: platforms, and a check of outputs and every gradient against the definition."""

from harness.checks import by_case, check, cotangents_for, evaluate, normal, with_gradients
from harness.platforms import PLATFORMS, Platform

__all__ = ["PLATFORMS", "Platform", "by_case", "check", "cotangents_for", "evaluate", "normal", "with_gradients"]
