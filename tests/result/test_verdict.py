"""The verdict: its numbers, its witnesses and its words."""

import dataclasses

import jax
import pytest

import pegprof
from pegprof.models.problem import load_problem
from pegprof.report.explain import explain, explain_affordability, explain_batch, explain_verdict
from pegprof.result.layers import Layer, find_layers, name_together, width
from pegprof.result.result import Result
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict, slope
from tests.result.results import GIB, GRAD, MICROBATCH, RESULT, SURGERY, VMAP


def test_activations_dominate_from_equality_on():
    assert Verdict(target="cpu", activation_bytes_per_example=8, parameter_bytes=8).activations_dominate
    assert not Verdict(target="cpu", activation_bytes_per_example=7, parameter_bytes=8).activations_dominate


@pytest.mark.parametrize(("temp_bytes", "bytes_per_example"), [((0, 16), 1), ((0, 15), None), ((9, 9), None)])
def test_a_slope_of_nothing_is_unknown(temp_bytes, bytes_per_example):
    assert slope(temp_bytes, (16, 32)) == bytes_per_example


def test_a_slope_is_never_negative():
    assert slope((100, 90)) is None


@pytest.mark.parametrize(
    ("xla", "traced", "dominate"),
    [(None, 2048, True), (None, 1023, False), (0, 2048, True), (None, None, None), (1, 2048, False)],
)
def test_where_xla_cannot_tell_the_trace_decides(xla, traced, dominate):
    assert verdict_of(xla, traced=traced).activations_dominate is dominate


@pytest.mark.parametrize(
    ("model", "options", "activations", "rule"),
    [
        ("mlp", {}, False, False),
        ("transformer-tiny", {}, True, True),  # T = 128, D = 64
        ("transformer-tiny", {"seq_len": 16, "width": 128, "layers": 1}, False, False),
    ],
)
def test_the_verdict_on_a_model_of_the_zoo(model, options, activations, rule):
    result = pegprof.profile(load_problem(model, options), methods=("grad",), batch=4, time=False)
    assert (result.verdict.activations_dominate, result.verdict.rule_says) == (activations, rule)
    assert [row.activations_dominate for row in result.rows] == [activations]


# Layers: T, D and T ≥ D.


@pytest.mark.parametrize(
    ("contraction", "shape", "D"),
    [
        ("bi,bo->io", (784, 1024), 784),
        ("bi,bo->io", (1024, 10), 10),
        ("bti,btop->iop", (1024, 16, 64), 1024),
        ("btij,bto->ijo", (16, 64, 1024), 1024),
        ("bti,bto->io", (12, 1024, 4096), 1024),  # twelve layers in one array
        ("btgi,btgo->gio", (8, 32, 64), 32),  # eight experts, side by side
        ("bti,bto->kio, k = 3×3 taps", (3, 3, 64, 128), 576),
        ("bti,bto->kio, k = 3×3 taps", (2, 3, 3, 64, 128), 576),
        ("bti,bto->kio, k = 3×3 taps", (3, 3, 1, 64), 9),  # depthwise
        ("bti,bto->kio, k = 1×1 taps", (1, 1, 64, 128), 64),
        ("scatter-add bto->io", (32000, 512), 32000),
        ("bti,bto->io + scatter-add bto->io", (32100, 1024), 1985),  # 32100 and 1024 numbers, on average 16562
        ("bti,bto->io + sum over a loop", (3, 4), None),
        ("bti,bto->io", (4,), None),  # the matrix is made of the parameter, and is not it
        ("bti,bto->kio, k = 3×3 taps", (7,), None),
        ("sum over a loop", (3, 4), None),
        ("add_any", (512, 1024), None),
    ],
)
def test_d_is_how_many_positions_hold_as_much_as_the_parameters(contraction, shape, D):
    assert width(contraction, shape) == D


def test_layers_that_are_alike_stand_together():
    problem = load_problem("transformer-tiny")
    params, batch = problem.abstract_params(), problem.abstract_batch(4)
    layers = find_layers(pegprof.make_plan(problem.loss, params, batch, keep_batch_dim=False, backend="cpu"))
    assert [(layer.count, layer.name, layer.T, layer.D) for layer in layers] == [
        (6, "block_*/attention/{key,query,value}/kernel", 128, 64),
        (2, "block_*/attention/out/kernel", 128, 64),
        (2, "block_*/down/kernel", 128, 64),
        (2, "block_*/up/kernel", 128, 64),
        (1, "embed/embedding", 256, 103),  # both uses see 128
    ]
    matrices = [x for x in jax.tree.leaves(params) if x.ndim > 1 and x.shape != (128, 64)]  # but the positions
    assert sum(layer.parameters for layer in layers) == sum(x.size for x in matrices)


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (["w"], [("w", 1)]),
        (["a", "b"], [("a", 1), ("b", 1)]),
        (["a/w", "b/w"], [("{a,b}/w", 2)]),
        (["a/w", "b/v"], [("a/w", 1), ("b/v", 1)]),
        (["a_0/w", "a_1/w", "a_0/v"], [("a_*/w", 2), ("a_0/v", 1)]),
        (["a/b/w", "a/w"], [("a/b/w", 1), ("a/w", 1)]),
        (["0", "1"], [("*", 2)]),
        ([], []),
    ],
)
def test_names_stand_together_where_they_differ_in_numbers_or_one_word(names, together):
    assert name_together(names) == together


def test_a_layer_whose_width_is_not_known_is_no_witness():
    unknown = Layer(name="w", count=1, shape=(3, 4), T=None, D=None)
    assert unknown.obeys_rule is None
    verdict = Verdict(target="cpu", activation_bytes_per_example=1, parameter_bytes=2, layers=(unknown,))
    assert (verdict.rule_share, verdict.rule_says) == (None, None)
    assert list(explain_verdict(verdict)) == [str(verdict)]


# Words.


def verdict_of(activations, *, traced=None, T=None):
    layers = (Layer(name="w", count=1, shape=(64, 64), T=T, D=64),) if T else ()
    return Verdict(
        target="cpu",
        activation_bytes_per_example=activations,
        parameter_bytes=1024,
        traced_bytes_per_example=traced,
        layers=layers,
    )


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (
            verdict_of(2048),
            "Activations dominate: on cpu one example takes 2.0 KiB of activations, at least the 1.0 KiB",
        ),
        (verdict_of(512), "Parameters dominate: on cpu one example takes 512 B of activations, less than the 1.0 KiB"),
        (verdict_of(2048, traced=4096), "The trace counts 4.0 KiB, and agrees."),
        (verdict_of(2048, traced=512), "The trace disagrees: it counts 512 B; XLA keeps more than that."),
        (
            verdict_of(512, traced=2048),
            "The trace disagrees: it counts 2.0 KiB; XLA shares or recomputes some of that.",
        ),
        (verdict_of(2048, T=64), "The paper's rule agrees: T ≥ D for all of the parameters in matrices."),
        (verdict_of(512, T=63), "The paper's rule agrees: T ≥ D for none of the parameters in matrices."),
        (
            verdict_of(2048, T=63),
            "The paper's rule disagrees: T ≥ D for none of the parameters in matrices; it is blind",
        ),
        (verdict_of(512, T=64), "The paper's rule disagrees: T ≥ D for all of the parameters in matrices; it is blind"),
    ],
)
def test_the_verdict_in_words_says_who_disagrees(verdict, words):
    assert words in " ".join(explain_verdict(verdict))


CANNOT_TELL = "XLA's figure for cpu cannot tell"
NO_GROWTH = f"{CANNOT_TELL}: its temporaries do not grow with the batch."


@pytest.mark.parametrize(
    ("verdict", "sentences"),
    [
        (
            verdict_of(None, traced=2048, T=64),
            [
                (
                    "Activations dominate, by the trace: it counts 2.0 KiB of activations for one example, at least "
                    f"the 1.0 KiB of the parameters. {NO_GROWTH}"
                ),
                "The paper's rule agrees: T ≥ D for all of the parameters in matrices.",
            ],
        ),
        (
            verdict_of(None, traced=512, T=63),
            [
                (
                    "Parameters dominate, by the trace: it counts 512 B of activations for one example, less than the "
                    f"1.0 KiB of the parameters. {NO_GROWTH}"
                ),
                "The paper's rule agrees: T ≥ D for none of the parameters in matrices.",
            ],
        ),
        (
            verdict_of(None, T=64),
            [
                (
                    f"Whether activations or parameters dominate is not known: {CANNOT_TELL}, and there is no count "
                    "from the trace."
                ),
                "By the paper's rule activations dominate: T ≥ D for all of the parameters in matrices.",
            ],
        ),
    ],
    ids=["activations", "parameters", "unknown"],
)
def test_a_verdict_without_xlas_figure_says_whose_it_is(verdict, sentences):
    assert list(explain_verdict(verdict)) == sentences


def test_where_parameters_dominate_vmap_has_no_room():
    (vmap, _) = explain_batch([dataclasses.replace(VMAP, peak_ratio=18.3, time_ratio=None)], verdict_of(512))
    assert vmap == (
        "vmap: the gradients of 64 examples, 64.0 KiB, are more than the 32.0 KiB of activations leave room for; "
        "it takes 18.3 × the memory of grad."
    )


def test_of_activations_that_are_not_known_no_number_is_given():
    (vmap, _) = explain_batch([dataclasses.replace(VMAP, peak_ratio=18.3)], verdict_of(None, traced=512))
    assert vmap.startswith("vmap: it forms the gradients of 64 examples, 64.0 KiB, and takes 18.3 × the memory of grad")


def test_what_surgery_materialises_is_said():
    row = dataclasses.replace(SURGERY, materialised_parameters=1)
    (surgery, _) = explain_batch([row], None)
    assert "but materialises those of 1 parameter;" in surgery


WHO = "A Micro optimizer, which takes mean and second_moment at every step, "


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [GRAD, SURGERY],
            "is affordable here: surgery takes 0.99 × the time of grad, and 13.0 GiB of 20.0 GiB available",
        ),
        ([dataclasses.replace(SURGERY, time_ratio=1.25)], "is affordable here"),
        ([dataclasses.replace(SURGERY, time_ratio=1.26)], "is affordable at a price here"),
        ([dataclasses.replace(SURGERY, time_ratio=2.01)], "is expensive here"),
        (
            [dataclasses.replace(SURGERY, time_ratio=None)],
            "fits in memory here: surgery takes 13.0 GiB of 20.0 GiB avail",
        ),
        ([GRAD, VMAP], "is not affordable here: vmap, which needs least, needs 86.7 GiB, and there are 20.0 GiB."),
        ([GRAD, MICROBATCH], "cannot be judged: no method but grad ended well."),
        ([dataclasses.replace(SURGERY, capacity_bytes=None, peak_ratio=None)], "× the time of grad, and 13.0 GiB."),
    ],
)
def test_whether_a_micro_optimizer_is_affordable_is_one_sentence_with_its_numbers(rows, words):
    (sentence,) = explain_affordability(rows)
    assert sentence.startswith(WHO)
    assert words in sentence


def test_the_cheapest_method_that_fits_is_the_one_to_be_afforded():
    slower = dataclasses.replace(SURGERY, method="microbatch", time_ratio=1.1, peak_bytes=GIB)
    faster_but_too_large = dataclasses.replace(VMAP, time_ratio=0.5)
    (sentence,) = explain_affordability([GRAD, slower, faster_but_too_large, SURGERY])
    assert "here: surgery takes 0.99" in sentence


def test_where_grad_alone_was_asked_for_there_is_nothing_to_judge():
    assert list(explain_affordability([GRAD])) == []


def test_a_result_without_a_verdict_still_says_what_is_affordable():
    sentences = explain(Result(settings=Settings(model="m"), rows=RESULT.rows))
    assert [sentence.split()[0] for sentence in sentences] == ["surgery:", "A"]
