"""KernelPolicy, the ledger, and which variant serves which card."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusestream.kernels_cuda import OPS, KernelPolicy, check_policy
from fusestream.kernels_cuda.binary.arch import (
    CUBINS,
    PTX,
    VARIANTS,
    isa_class,
    preference,
    too_old,
)
from fusestream.kernels_cuda.ledger import Choice, Ledger
from fusestream.kernels_cuda.policy import ISA_CLASSES, PRECISIONS

modes = st.sampled_from(["auto", "on", "off"])
policies = st.builds(
    lambda default, ops, precision, isa: KernelPolicy.of(default, precision=precision, isa=isa, **ops),
    modes,
    st.dictionaries(st.sampled_from(sorted(OPS)), modes),
    st.sampled_from(PRECISIONS),
    st.sampled_from([None, *ISA_CLASSES]),
)


@given(policies)
def test_a_policy_survives_every_road(policy):
    assert KernelPolicy.parse(policy.token) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert hash(KernelPolicy.parse(policy.token)) == hash(policy)


@given(policies, policies)
def test_equal_means_same_token(a, b):
    assert (a == b) == (a.token == b.token)


def test_modes():
    policy = KernelPolicy.of("off", norm_modulate="on")
    assert policy.mode("norm_modulate") == "on"
    assert policy.mode("gated_residual") == "off"
    assert KernelPolicy(ops=(("b", "on"), ("a", "off"))) == KernelPolicy(ops=(("a", "off"), ("b", "on")))


def test_tiers_beyond_precise_have_half_sums():
    assert {precision: KernelPolicy.of(precision=precision).sums for precision in PRECISIONS} == {
        "auto": "precise", "precise": "precise", "fast": "fast", "turbo": "fast",
    }  # fmt: skip


def test_what_a_policy_refuses():
    with pytest.raises(ValueError, match="mode of default is 'yes'"):
        KernelPolicy("yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode of norm_modulate is 'maybe'"):
        KernelPolicy.of(norm_modulate="maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision is 'sloppy'"):
        KernelPolicy.of(precision="sloppy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="isa is 'sm_70'"):
        KernelPolicy.of(isa="sm_70")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no op is called norm_modulat;"):
        check_policy(KernelPolicy.of(norm_modulat="on"))
    check_policy(KernelPolicy.of(norm_modulate="on"))
    with pytest.raises(AttributeError):
        KernelPolicy().default = "on"  # type: ignore[misc]


def test_the_ledger_says_each_reason_once(caplog):
    ledger = Ledger()
    with caplog.at_level(logging.INFO, "fusestream.kernels"):
        for example in ("first", "second"):
            ledger.refused("op", "cuda", "x is bfloat16", example, "stock")
        ledger.refused("op", "cuda", "another reason", "third", "stock")
        ledger.say_once("archive is stale")
        ledger.say_once("archive is stale")
    assert [(r.reason, r.example, r.times) for r in ledger.refusals] == [
        ("x is bfloat16", "first", 2),
        ("another reason", "third", 1),
    ]
    assert [record.message for record in caplog.records] == [
        "op: cuda cannot serve first: x is bfloat16. stock serves it.",
        "op: cuda cannot serve third: another reason. stock serves it.",
        "archive is stale",
    ]
    ledger.chose(Choice("op", "8x8", "cuda", "measured", {"cuda": 1.0, "stock": 2.0}))
    ledger.chose(Choice("op", "8x8", "stock", "measured"))
    assert [c.winner for c in ledger.choices] == ["stock"]
    ledger.clear()
    assert not (ledger.refusals or ledger.choices or ledger.messages)


@pytest.mark.parametrize(
    ("capability", "best"),
    [
        ((6, 1), "sm_61"),
        ((6, 2), "sm_61"),
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), "compute_80"),
        ((11, 0), "compute_80"),
    ],
)
def test_the_best_variant_comes_first(capability, best):
    """Before a unit is looked at: extra variants stand in front, and are passed over where a unit has none."""
    assert preference(capability)[0] == best
    plain = [v for v in preference(capability) if v in VARIANTS]
    assert plain[-2:] == ["compute_80", "compute_75"] or capability < (8, 0)


def test_a_cubin_runs_on_its_own_major_only():
    for variant in CUBINS:
        for capability in ((6, 1), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)):
            if variant in preference(capability):
                arch = int(variant.split("_")[1])
                assert arch // 10 == capability[0] and arch % 10 <= capability[1]


def test_a_forced_class_leaves_its_ptx():
    assert preference((9, 0), "sm_61") == ["compute_61"] and "compute_61" not in preference((9, 0))
    assert preference((9, 0), "sm_75") == ["compute_75"]
    assert preference((9, 0), "sm_80") == ["compute_80"]
    assert preference((7, 5), "sm_80") == []
    for capability in ((5, 2), (6, 0), (7, 0), (7, 2)):  # 6.0 has no dp4a, 7.0 no ldmatrix
        assert too_old(capability) and f"{capability[0]}.{capability[1]} has no code here" in str(too_old(capability))
    assert not any(map(too_old, ((6, 1), (6, 2), (7, 5), (8, 9), (12, 0))))
    assert [isa_class(v) for v in CUBINS] == ["sm_61", "sm_75", "sm_80", "sm_80", "sm_80"]
    assert [isa_class(v) for v in PTX] == ["sm_61", "sm_75", "sm_80"]
