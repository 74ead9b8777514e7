"""Math grading at its edges: what is extracted, the exact value that is read, and each limit from both sides."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction

import pytest

from gspo.rewards.graders import math as grader
from gspo.rewards.graders import symbolic
from gspo.rewards.graders.answers import MAX_ANSWER, MAX_TAIL, extract_answer, extract_marked
from gspo.rewards.graders.math import compare_values, grade_math, is_symbolic, same_answer
from gspo.rewards.graders.values import Items, Number, clean, read_number, read_value
from gspo.rewards.pool.worker_pool import JobFailed
from gspo.rewards.protocol import RewardError
from gspo.types import Reward

F = Fraction


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\fbox{3} of 4", "3"),
        (r"\boxed {3} of 4", "3"),
        (r"\boxed{\boxed{3}} of 4", r"\boxed{3}"),
        (r"\boxed{1} so \boxed 7 of 9", "7"),
        (r"\boxed 7 so \boxed{1} of 9", "1"),
        (r"\boxed{2} } of 9", "2"),
        (r"\boxed{ 2 } of 9", "2"),
        (r"\boxed{a_{1} + {2}} of 9", "a_{1} + {2}"),
        (r"\boxed x of 9", "x"),
        (r"#### five \boxed{", r"five \boxed{"),
        ("#### 1\n#### 2", "2"),
        ("the answer is ** 7 ** ", "7"),
        (r"} \boxed{2} of 9", "2"),
        (r"\boxed{a\}b} of 9", r"a\}b"),
        (r"{\boxed{2}} of 9", "2"),
        ("#### 5\nand 7", "5"),
        ("##### 5 apples", "5 apples"),
        ("####\n\n5\n7", "5"),
        (r"#### \boxed{3}", "3"),
        (r"\boxed{ } so the answer is 5", "5"),
        ("#### \nno", "no"),
        (r"\boxed{3}. The answer is 4", "3"),
        ("The answer is 4, of 9", "4, of 9"),
        ("ANSWER = 4", "4"),
        ("the answer:4\nand 9", "4"),
        ("the answer is\n 5 \n9", "5"),
        ("the answer is 3.5.\nand 9", "3.5"),
        ("the answer is 3.5. And 9", "3.5"),
        ("the answer is **7**", "7"),
        ("the answer is . 8", "8"),
        ("the answer is 1, the answer is 2", "2"),
        ("it costs -$3.50, as said", "-$3.50"),
        ("of 20, 50%", "50%"),
        ("one of 12,", "12"),
        ("now .5", ".5"),
        ("+3/4% more", "+3/4%"),
        ("x" * MAX_TAIL, None),
        ("7" + "x" * MAX_TAIL, None),
        ("7" + "x" * (MAX_TAIL - 1), "7"),
        (rf"7 \boxed{{{'9' * MAX_ANSWER}}}", "9" * MAX_ANSWER),
        (rf"7 \boxed{{{'9' * (MAX_ANSWER + 1)}}}", None),
    ],
)
def test_the_answer_of_a_response(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "marked"),
    [("so\n#### 12\n", "12"), (r"\boxed{ 12 }", "12"), ("12", None), ("the answer is 12", None), ("####", None)],
)
def test_only_a_marked_answer_is_taken_out_of_a_truth(text: str, marked: str | None) -> None:
    assert extract_marked(text) == marked
    far = "#### 5" + "x" * MAX_TAIL
    assert extract_marked(far) is None


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" **5** ", "5"),
        ("$5$.", "5"),
        (r"\(5\)", "5"),
        (r"\[5\]", "5"),
        (r"\left( 5 \right)", "( 5 )"),
        (r"\leftarrow", r"\leftarrow"),
        (r"5\%", "5%"),
        (r"5\,000", "5 000"),
        ("5~cm", "5 cm"),
        (r"a\\b", "a b"),
        (r"90^{\circ}", "90"),
        (r"90\degree", "90"),
        ("90°", "90"),
        (r"5\quad6", "5 6"),
        (r"\textbf{yes}", "yes"),
        ("2×3·4", r"2\times 3\cdot 4"),
        ("5.,;: ", "5"),
        ("x = 5", "5"),
        ("f(x) = 5", "5"),
        ("the total cost = 5", "5"),
        ("a" * 32 + " = 5", "a" * 32 + " = 5"),
        ("x = y = 5", "x = y = 5"),
        ("x == 5", "x == 5"),
        ("２，０００．５％", "2,000.5%"),
    ],
)
def test_an_answer_is_cleaned(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", Number(F(7), 0)),
        ("7.", Number(F(7), 0)),
        ("1.50", Number(F(3, 2), 2)),
        (".25", Number(F(1, 4), 2)),
        ("- 5", Number(F(-5), 0)),
        ("+5", Number(F(5), 0)),
        ("-€ 5.5", Number(F(-11, 2), 1)),
        ("( -5 )", Number(F(-5), 0)),
        ("-(5)", None),
        ("15)", None),
        ("(15", None),
        ("(1,234)", None),
        ("- €5", Number(F(-5), 0)),
        ("3/4", Number(F(3, 4), None)),
        ("0.1/0.2", Number(F(1, 2), None)),
        ("3/0", None),
        ("3/4 cup", Number(F(3, 4), None)),
        ("2 1/4", Number(F(9, 4), None)),
        ("2 1/4 cups", Number(F(9, 4), None)),
        ("2 0/4", Number(F(2), None)),
        ("2 4/4", None),
        ("2 1/0", None),
        ("1.5 1/2", None),
        (r"2\frac{3}{4} cups", Number(F(11, 4), None)),
        (r"2 \frac{0}{4}", Number(F(2), None)),
        (r"2\frac{4}{4}", None),
        (r"2\frac12", Number(F(5, 2), None)),
        (r"2\frac{x}{2}", None),
        (r"2 x \frac{1}{2}", None),
        ("2 a 1/2", None),
        ("2 cm x 10^3", None),
        ("2 kg / 4", None),
        (r"2\frac{-1}{4}", None),
        (r"1.5\frac{1}{2}", None),
        (r"\frac{1}2 cup", Number(F(1, 2), None)),
        (r"\cfrac{+1.5}{ -3 }", Number(F(-1, 2), None)),
        (r"\frac{x}{2}", None),
        ("1.5e3", Number(F(1500), 0)),
        ("1.25e1", Number(F(25, 2), 1)),
        ("1.5e-3 m", Number(F(3, 2000), 4)),
        ("2 x 10^-3", Number(F(1, 500), 3)),
        ("2*10^{ 3 } kg", Number(F(2000), 0)),
        ("1e300", Number(F(10) ** 300, 0)),
        ("1e-300", Number(F(10) ** -300, 300)),
        ("1e301", None),
        ("1e-301", None),
        ("10^3", None),
        ("12.5%", Number(F(25, 2), 1, percent=True)),
        ("50 percent", Number(F(50), 0, percent=True)),
        ("50 per cent", Number(F(50), 0, percent=True)),
        ("50% off", Number(F(50), 0, percent=True)),
        ("3/4 %", Number(F(3, 4), None, percent=True)),
        ("1 234 567", Number(F(1234567), 0)),
        ("1,234.5", Number(F(2469, 2), 1)),
        ("12 34", None),
        ("1,2345", None),
        ("5cm", Number(F(5), 0)),
        ("5Cents", Number(F(5), 0)),
        ("5dogs", None),
        ("5 dogs", Number(F(5), 0)),
        ("5 ft.", Number(F(5), 0)),
        ("5 m/s", Number(F(5), 0)),
        ("5 m^2", Number(F(5), 0)),
        ("5 m^{3}", Number(F(5), 0)),
        ("5 m^4", None),
        ("5 ^2", None),
        ("5 xy", None),
        ("5 xyz", Number(F(5), 0)),
        ("5 pi", None),
        ("5 dogs or cats", None),
        ("5 Million", None),
        ("5 +", None),
    ],
)
def test_the_number_its_decimals_and_its_percent_sign(text: str, number: Number | None) -> None:
    assert read_number(text) == number


def numbers(*values: int) -> tuple[Number, ...]:
    return tuple(Number(F(value), 0) for value in values)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1, 2", Items("", numbers(1, 2))),
        ("1 and 2", Items("", numbers(1, 2))),
        ("1 or 2", Items("", numbers(1, 2))),
        ("1, 2, and 3", Items("", numbers(1, 2, 3))),
        ("1, 2, or 3", Items("", numbers(1, 2, 3))),
        ("x = 1, y = 2", Items("", numbers(1, 2))),
        ("(1,2)", Items("()", numbers(1, 2))),
        ("[1, 2)", Items("[)", numbers(1, 2))),
        ("(1,2]", Items("(]", numbers(1, 2))),
        (r"\{3\}", Items("{}", numbers(3))),
        (r"\{3, 1, 1\}", Items("{}", numbers(3, 1, 1))),
        ("(3)", Number(F(3), 0)),
        ("[3]", None),
        ("1,2", None),
        ("1, x", None),
        ("(1,x)", None),
        ("(" + ",".join("1" * 50) + ")", Items("()", numbers(*[1] * 50))),
        ("(" + ",".join("1" * 51) + ")", None),
        ("0" * 1000, Number(F(0), 0)),
        ("0" * 1001, None),
        ("", None),
        ("B", "b"),
        ("(B)", "b"),
        ("Yes", "yes"),
        ("no", None),
        ("North-East", "north-east"),
        ("a b c", None),
        ("pi day", None),
        ("a" * 61, "a" * 61),
        ("a" * 62, None),
        ("room 5", None),
    ],
)
def test_the_value_of_an_answer(text: str, value: object) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("0.333333", "1/3", True),
        ("0.33333", "1/3", False),
        ("0.333334", "1/3", False),
        ("0.1234567", "0.123457", True),
        ("0.1234564", "0.123457", False),
        ("4.9999999", "5", False),
        ("0.00012345", "0.0001234", True),
        ("0.00012346", "0.0001234", False),
        ("0.0010004", "0.001", True),
        ("0.0010006", "0.001", False),
        ("33.333333%", "1/3", True),
        ("33.3333%", "1/3", False),
        ("50%", "0.5%", False),
        ("50%", "50.0%", True),
        ("150%", "1.5", True),
        ("1.5%", "150", False),
        ("1, 2", "1, 2, 3", False),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        (r"\{1, 2\}", r"\{2, 3\}", False),
        ("[1, 2]", "[1, 2]", True),
        ("[1, 2]", "[2, 1]", False),
        ("(0.333333, 1)", "(1/3, 1)", True),
        ("(1, 2)", "[1, 2]", None),
        ("(1, 2)", "1, 2", None),
        ("1, 2", "1", None),
        ("1, 2", "north", None),
        ("north", "1", False),
        ("north", "x+1", None),
    ],
)
def test_values_are_compared_in_both_directions(one: str, other: str, same: bool | None) -> None:
    a, b = read_value(clean(one)), read_value(clean(other))
    assert compare_values(a, b) is same and compare_values(b, a) is same


def power(number: int) -> str:
    return "+".join(f"x^{i}" for i in range(1, number + 1))


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ("+".join(["x"] * 150) + "+", "+".join(["x"] * 151)),  # 300 and 301 characters
        ("(" * 10 + "x" + ")" * 10, "(" * 11 + "x" + ")" * 11),
        ("{[(" * 3 + "x" + ")]}" * 3, "{[(" * 4 + "x" + ")]}" * 4),
        ("(x)" * 12, "(((((((((((x"),
        ("x+" + "1" * 30, "x+" + "1" * 31),
        (power(6), power(7)),
        ("x**2", "2**100"),
        (r"\sin x+\cos x+\ln x+\arctan x", r"\sin x+\cos x+\ln x+\arctan x+\exp x"),
        ("x!+y!", "x!+y!+z!"),
        ("99!", "100!"),
        ("x!", "(x)!"),
        ("x! + y", "x! !"),
        ("x^{99}", "x^{100}"),
        ("x^99", "x^100"),
        ("(x)^{9}", "(x)^{10}"),
        ("[x]^9", "[x]^10"),
        ("x^{-99}", "x^{-100}"),
        ("x^{a+1}", "x^{a^1}"),
        ("x^2+y^2", "x^2^2"),
        (r"\binom{99}{3}", r"\binom{100}{3}"),
        (r"\binom{9}{3}", r"\binom{n}{3}"),
        ("xy+z", "xyz+z"),
        ("sqrt(x)", "sqr(x)"),
        (r"\mathrm{ab}", r"\mathrm{abc}"),
        (r"\alpha", r"\aleph"),
        ("x_1", "x__1"),
        ("x+e", "1e2"),
        ("x+1", "x+é"),
    ],
)
def test_each_limit_on_what_math_verify_sees(accepted: str, refused: str) -> None:
    assert is_symbolic(accepted) and not is_symbolic(refused)


def test_a_large_number_of_the_truth_allows_the_same_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(grader, "symbolic_equal", lambda answer, truth: bool(asked.append((answer, truth))) or True)
    assert same_answer("(1+x)^{20}", "(x+1)^{20}")
    assert not same_answer("(1+x)^{21}", "(x+1)^{20}")
    assert same_answer("x^{1000}+1", "1+x^{1000}")
    assert not same_answer("x^{10000}+1", "1+x^{10000}")  # a number of five digits is no exponent
    assert asked == [("(1+x)^{20}", "(x+1)^{20}"), ("x^{1000}+1", "1+x^{1000}")]


def test_a_truth_may_be_marked_and_text_decides_before_values() -> None:
    assert same_answer("5", r"so \boxed{5}", symbolic=False)
    assert same_answer("5.0", "6 and so\n#### 5", symbolic=False)
    assert same_answer("x + 1", "x+1", symbolic=False) and same_answer("x+1", "x + 1", symbolic=False)
    assert same_answer("y" * 301, "y" * 301)
    long = "x+" * 150
    with pytest.raises(RewardError, match="it is longer than 300 characters"):
        same_answer("5", long + "y")
    assert not same_answer(r"\int", long[:299])  # 299 characters are graded; this answer is none
    with pytest.raises(RewardError, match="not a number"):
        same_answer("5", "x+1", symbolic=False)
    assert not same_answer("x+1", "5", symbolic=False)


def test_the_reward_of_an_answer() -> None:
    right, wrong = Reward(1.0, 1.0, {"answered": 1.0}), Reward(0.0, 0.0, {"answered": 1.0})
    silent = Reward(0.0, 0.0, {"answered": 0.0})
    assert grade_math("#### 5", 5, symbolic=False) == right
    assert grade_math("#### 5", ["4", 5.0], symbolic=False) == right
    assert grade_math("#### 5", ("4", "6"), symbolic=False) == wrong
    assert grade_math("#### 5", "3 more than 2 is\n#### 5", symbolic=False) == right
    assert grade_math("nothing", ["4", "5"], symbolic=False) == silent


def test_a_verdict_under_an_alarm_leaves_no_alarm_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGALRM)
    for verdict in (True, False):
        monkeypatch.setattr(
            symbolic, "_compare", lambda answer, truth, verdict=verdict: verdict and (answer, truth) == ("a", "b")
        )
        assert symbolic._limited("a", "b") is verdict
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0

    def failing(answer: str, truth: str) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(symbolic, "_compare", failing)
    with pytest.raises(ZeroDivisionError):
        symbolic._limited("a", "b")
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_a_worker_compares_itself_and_others_ask_the_verifying_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Pool:
        def submit(self, pair: tuple[str, str]) -> Future[bool]:
            asked.append(pair)
            future: Future[bool] = Future()
            future.set_result(True) if pair[0] == "a" else future.set_exception(JobFailed("it hung"))
            return future

    monkeypatch.setattr(symbolic, "_verifier", Pool)
    monkeypatch.setattr(symbolic, "_limited", lambda answer, truth: (answer, truth) == ("x", "y"))
    monkeypatch.delenv("GSPO_REWARD_WORKER", raising=False)
    assert symbolic.symbolic_equal("a", "b") and asked == [("a", "b")]
    with pytest.raises(RewardError, match="math-verify gave no verdict on 'c' against 'd': it hung"):
        symbolic.symbolic_equal("c", "d")
    monkeypatch.setenv("GSPO_REWARD_WORKER", "1")
    assert symbolic.symbolic_equal("x", "y") and not symbolic.symbolic_equal("y", "x") and len(asked) == 2
    with ThreadPoolExecutor(1) as threads:  # an alarm works in the main thread only
        assert threads.submit(symbolic.symbolic_equal, "a", "b").result() and asked[-1] == ("a", "b")
