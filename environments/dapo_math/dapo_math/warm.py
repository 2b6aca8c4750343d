"""Imported by the fork server alone, before its first worker: readies math-verify for all of them."""

from dapo_math import worker

worker.warm()
