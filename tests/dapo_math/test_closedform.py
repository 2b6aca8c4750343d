"""Closed forms: what is read has that value, what has two readings is not read, and nothing equal is told apart."""

import math
from dataclasses import dataclass

import pytest
from dapo_math.closedform import certainly_differ, closed_form
from dapo_math.numbers import clean
from dapo_math.problems import SelectionConfig, select_problems
from hypothesis import given
from hypothesis import strategies as st

from tests.dapo_math.test_grading import CASES


@dataclass(frozen=True)
class Form:
    """LaTeX, and its value worked out beside it."""

    text: str
    value: float


integers = st.integers(0, 99).map(lambda n: Form(str(n), float(n)))
leaves = st.one_of(integers, st.just(Form("\\pi", math.pi)))


def larger(inner: st.SearchStrategy[Form]) -> st.SearchStrategy[Form]:
    def root(form: Form) -> Form:
        return Form(f"\\sqrt{{{form.text}}}", math.sqrt(form.value)) if form.value >= 0 else form

    def fraction(pair: tuple[Form, Form]) -> Form:
        above, below = pair
        if abs(below.value) < 1e-6:
            return above
        return Form(f"\\frac{{{above.text}}}{{{below.text}}}", above.value / below.value)

    pairs = st.tuples(inner, inner)
    return st.one_of(
        inner.map(root),
        pairs.map(fraction),
        pairs.map(lambda p: Form(f"({p[0].text} + {p[1].text})", p[0].value + p[1].value)),
        pairs.map(lambda p: Form(f"({p[0].text} - ({p[1].text}))", p[0].value - p[1].value)),
        pairs.map(lambda p: Form(f"({p[0].text})({p[1].text})", p[0].value * p[1].value)),
        inner.map(lambda f: Form(f"({f.text})^2", f.value**2) if f.value >= 0 else f),
        inner.map(lambda f: Form(f"-({f.text})", -f.value)).map(lambda f: Form(f"({f.text})", f.value)),
    )


forms = st.recursive(leaves, larger, max_leaves=6)


@given(forms)
def test_a_closed_form_has_the_value_that_it_spells(form: Form):
    value = closed_form(form.text)
    if len(form.text) <= 200 and math.isfinite(form.value):
        assert value == pytest.approx(form.value, rel=1e-9, abs=1e-9)


@given(forms, forms)
def test_equal_numbers_are_never_told_apart(one: Form, other: Form):
    if one.value == pytest.approx(other.value, rel=1e-4, abs=1e-10):
        assert not certainly_differ(one.text, other.text)


@pytest.mark.parametrize(
    "text",
    ["2 3", "2\\frac{1}{2}", "1/2\\pi", "1/2(3)", "2^10", "2^3^2", "\\sqrt13", "\\frac12", "x", "e", "i", "3!", "|3|"]
    + ["1,5", "(1,2)", "2_8", "-2^2 = 4", "", "()", "\\sqrt{-4}", "(-8)^{1/3}", "1/0", "9^{9^{9}}", "\\pi\\alpha"]
    + ["(" * 100 + "1" + ")" * 100, "1" * 500, "٣", "{1", "\\frac{1}"],
)
def test_what_has_two_readings_or_none_is_left_to_algebra(text: str):
    assert closed_form(text) is None


def test_signs_powers_and_products_are_read_as_in_mathematics():
    assert closed_form("-3^2") == -9
    assert closed_form("11\\sqrt{5} + 11") == pytest.approx(11 * math.sqrt(5) + 11)
    assert closed_form("\\frac{3\\pi}{4}") == pytest.approx(3 * math.pi / 4)
    assert closed_form("\\sqrt[3]{27}") == pytest.approx(3)
    assert closed_form("2\\cdot 3^{2} - 8 \\div 4") == 16


def test_no_known_answer_differs_from_itself_or_from_a_right_answer():
    for problem in select_problems("math500", SelectionConfig())[0]:
        assert not certainly_differ(clean(problem.answer), clean(problem.answer))
    for case in CASES:
        if case["expected"] == 1.0 and case["certainty"] == "high":
            answer = case["response"].rpartition("\\boxed{")[2].rpartition("}")[0]
            assert not certainly_differ(clean(answer), clean(case["gold"])), case["id"]
