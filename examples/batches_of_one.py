"""A model of the zoo whose examples are passed as batches of one, to see that surgery costs the same either way.

pegprof run examples/batches_of_one.py:batches_of_one --set model=transformer-151m --target tpu-v5p --no-time

"""

import dataclasses

from pegprof import Problem
from pegprof.models.problem import load_problem


def batches_of_one(model: str = "transformer-tiny") -> Problem:
    return dataclasses.replace(load_problem(model), name=f"{model}-batches-of-one", keep_batch_dim=True)
