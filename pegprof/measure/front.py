"""Which mesh of a slice? Settings and a slice in, Front out: what each mesh holds, and what it moves for that.

Each mesh of ``meshes.candidate_meshes`` is asked what ``fit`` is asked of one: the largest batch of the whole slice, by
each method. All are compiled at one common batch too. There a mesh is on the front if no other needs less memory on a
device without moving more, and moves less without needing more.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import fit as fitting
from pegprof.measure.fit import Answer, Fit
from pegprof.measure.progress import Talk
from pegprof.measure.session import Save
from pegprof.result.result import Result, Row
from pegprof.result.settings import Settings
from pegprof.targets.meshes import candidate_meshes, describe, shares_of
from pegprof.targets.selection import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A mesh and a method at the common batch.

    Args:
      mesh: as ``--mesh`` takes it.
      method: by name.
      row: what was compiled; None if the time limit came before.
      answer: the largest batch; None where one batch was asked about.
      most: the largest batch of interest.
      is_on_front: whether it fits, and no other mesh is better in memory or in bytes moved without being worse in the
        other.
    """

    mesh: str
    method: str
    row: Row | None
    answer: Answer | None
    most: int | None
    is_on_front: bool = False

    @property
    def costs(self) -> tuple[int, int] | None:
        """Bytes held and moved, of what fits."""
        if self.row is None or self.row.status != "ok":
            return None
        if self.row.peak_bytes is None or self.row.collective_bytes is None:
            return None
        return self.row.peak_bytes, self.row.collective_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Front:
    """What was found of each mesh.

    Args:
      result: the rows of all meshes.
      batch: that at which they are compared.
      fits: by mesh, as ``--mesh`` takes it.
      untried: meshes that the time limit came before.
      refused: why others cannot be had, by mesh: they do not divide the batch, or the model's own sharding.
      asked: whether that batch was asked about, and no other.
    """

    result: Result
    batch: int
    fits: dict[str, Fit]
    untried: tuple[str, ...] = ()
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    asked: bool = False

    @property
    def points(self) -> list[Point]:
        """Method by method, in the order of the meshes."""
        return [point for method in self.result.settings.methods for point in mark_front(self._points_of(method))]

    def _points_of(self, method: str) -> Iterator[Point]:
        for mesh, fit in self.fits.items():
            rows = (row for row in fit.result.rows if (row.method, row.batch) == (method, self.batch))
            answers = (answer for answer in fit.answers if answer.method == method)
            yield Point(mesh=mesh, method=method, row=next(rows, None), answer=next(answers, None), most=fit.most)

    @property
    def exit_code(self) -> ExitCode:
        """As that of one ``fit``; where one batch was asked about, whether it fits on some mesh."""
        codes = {fit.exit_code for fit in self.fits.values()}
        if ExitCode.UNMEASURED in codes:
            return ExitCode.UNMEASURED
        if self.asked and ExitCode.OK in codes:
            return ExitCode.OK
        if self.untried or ExitCode.TIME_LIMIT in codes:
            return ExitCode.TIME_LIMIT
        return ExitCode.NO if self.asked else ExitCode.OK


def mark_front(points: Iterator[Point] | Sequence[Point]) -> list[Point]:
    """The points, with those marked that no other is better than."""
    given = list(points)
    costs = [point.costs for point in given if point.costs]

    def is_beaten(own: tuple[int, int]) -> bool:
        return any(held <= own[0] and moved <= own[1] and (held, moved) != own for held, moved in costs)

    return [
        dataclasses.replace(point, is_on_front=point.costs is not None and not is_beaten(point.costs))
        for point in given
    ]


def choose_meshes(target: Target, *, batch: int | None) -> list[Target]:
    """The target in each mesh that is tried.

    Raises:
      PegprofError: it is one device, or no mesh divides the batch.
    """
    if target.count == 1:
        what = f"--mesh auto needs several devices, and {target.name} is one"
        raise PegprofError(what, hint="name a slice, such as --target tpu-v5p:4x4x4, h100:8 or cpu:8")
    meshes = candidate_meshes(target.count, target.per_host)
    if batch and all(batch % shares_of(mesh) for mesh in meshes):
        what = f"a batch of {batch} cannot be cut for any mesh of {target.name}"
        raise PegprofError(what, hint=f"choose a multiple of {min(map(shares_of, meshes))}")
    return [dataclasses.replace(target, mesh=mesh) for mesh in meshes]


def common_batch(settings: Settings, targets: Sequence[Target]) -> int:
    """The largest batch up to that of the settings which all meshes divide, or the smallest if there is none."""
    size = settings.microbatch_size if "microbatch" in settings.methods else 1
    step = math.lcm(size, *(shares_of(target.mesh) for target in targets))
    return max(settings.batches[0] // step, 1) * step


def find_front(
    settings: Settings,
    target: Target,
    *,
    batch: int | None,
    most: int,
    talk: Talk,
    save: Save,
    debug: bool = False,
) -> Front:
    """Asks about each mesh of a slice in turn.

    Of the time that is left each has an equal part, and what it does not need is for the others. A mesh that does not
    divide the batch, or that the model's own sharding cannot be on, is left out; if that is so of the first that is
    tried, it is an error.

    Args:
      settings: what is asked, with the batch at which a search begins.
      target: the slice.
      batch: the only one of interest; None for all.
      most: the largest of interest.
      talk: is told what is going on.
      save: is given the rows of all meshes so far.
      debug: talk also passes on what children print.
    """
    end_s = time.monotonic() + settings.time_limit_s
    targets = choose_meshes(target, batch=batch)
    common = batch or common_batch(settings, targets)
    fits: dict[str, Fit] = {}
    untried: list[str] = []
    refused: dict[str, str] = {}

    def save_all(latest: Result) -> None:
        save(_join([*(fit.result for fit in fits.values()), latest]))

    for number, ours in enumerate(targets):
        mesh, left_s = describe(ours.mesh), (end_s - time.monotonic()) / (len(targets) - number)
        if batch and batch % shares_of(ours.mesh):
            refused[mesh] = f"a batch of {batch} cannot be cut into {shares_of(ours.mesh)} parts"
            continue
        if left_s <= 0:
            untried.append(mesh)
            continue
        talk(f"mesh {mesh} ({number + 1} of {len(targets)})")
        asked = dataclasses.replace(settings, batches=(common,), time_limit_s=left_s, mesh=ours.mesh)
        try:
            if batch:
                fits[mesh] = fitting.check_fit(asked, ours, talk=talk, save=save_all, debug=debug)
            else:
                begun, up_to = fitting.start_at_multiple(asked, ours, most=most)
                fits[mesh] = fitting.find_largest(
                    begun, ours, most=up_to, talk=talk, save=save_all, debug=debug, also=common
                )
        except PegprofError as error:
            if error.exit_code == ExitCode.TIME_LIMIT:
                untried.append(mesh)
            elif error.exit_code == ExitCode.USAGE and fits:
                refused[mesh] = error.what
            else:
                raise
    if not fits:
        what = "the time limit came before anything was compiled"
        raise PegprofError(what, hint="give it a longer --time-limit", exit_code=ExitCode.TIME_LIMIT)
    result = dataclasses.replace(_join([fit.result for fit in fits.values()]), settings=settings)
    return Front(
        result=result, batch=common, fits=fits, untried=tuple(untried), refused=refused, asked=batch is not None
    )


def _join(results: Sequence[Result]) -> Result:
    """The rows of several results, which have nothing else in common but the first one's settings."""
    rows = tuple(row for result in results for row in result.rows)
    return Result(settings=results[0].settings, rows=rows, complete=all(result.complete for result in results))
