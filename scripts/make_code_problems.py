"""Write src/gspo/data/problems/code.jsonl: the problems of the `code` dataset.

    python scripts/make_code_problems.py

A problem is a statement, a reference solution, hand-written examples and further inputs. The expected outputs of
the further inputs come from the solution; the examples are checked against it, so that a solution that does not do
what its statement says is found here.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

OUT = Path(__file__).parent.parent / "src" / "gspo" / "data" / "problems" / "code.jsonl"
PROBLEMS: list[dict[str, Any]] = []


def call(name: str, level: str, args: str, task: str, solution: str, examples: list, more: list) -> None:
    """A problem solved by a function; examples are (arguments, value), `more` lists further arguments."""
    scope: dict[str, Any] = {}
    exec(solution, scope)
    function = scope[name]
    for arguments, expected in examples:
        got = function(*json.loads(json.dumps(arguments)))
        assert got == expected and type(got) is type(expected), (name, arguments, got, expected)
    values = [expected for _, expected in examples]
    values += [function(*json.loads(json.dumps(arguments))) for arguments in more]
    shown, value = examples[0]
    statement = (
        f"Write a Python function `{name}({args})`. {task} "
        f"For example, `{name}({', '.join(map(repr, shown))})` is `{value!r}`."
    )
    # Text is written as JSON, so that a result such as "12" is not taken for the number.
    outputs = [json.dumps(v) if isinstance(v, str) else v for v in values]
    tests = {"fn_name": name, "inputs": [a for a, _ in examples] + more, "outputs": outputs}
    _add(name, level, "function", statement, tests, solution)


def stdin(name: str, level: str, task: str, solution: str, examples: list, more: list) -> None:
    """A problem solved by a program; examples are (input, output), `more` lists further inputs."""
    for text, expected in examples:
        assert _run(solution, text).rstrip() == expected.rstrip(), (name, text, _run(solution, text), expected)
    inputs = [text for text, _ in examples] + more
    shown, output = examples[0]
    statement = f"Write a Python program. {task}\nExample input:\n{shown.rstrip()}\nExample output:\n{output.rstrip()}"
    _add(name, level, "stdin", statement, {"inputs": inputs, "outputs": [_run(solution, t) for t in inputs]}, solution)


def _add(name: str, level: str, style: str, statement: str, tests: dict, solution: str) -> None:
    assert len(tests["inputs"]) >= 5, f"{name} has {len(tests['inputs'])} tests; expected at least 5"
    assert len({json.dumps(o) for o in tests["outputs"]}) >= 2, f"{name}: one constant would pass every test"
    PROBLEMS.append(
        {
            "id": name,
            "level": level,
            "style": style,
            "statement": statement,
            "tests": tests,
            "solution": solution.strip() + "\n",
        }
    )


def _run(solution: str, text: str) -> str:
    out = io.StringIO()
    with mock.patch.object(sys, "stdin", io.StringIO(text)), contextlib.redirect_stdout(out):
        exec(solution, {"__name__": "__main__"})
    return out.getvalue()


def numbers(seed: int, count: int, low: int = -50, high: int = 50) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


# fmt: off  (a problem is easier to read when it is not spread over the page)


def easy_functions() -> None:
    call(
        "is_leap",
        "easy",
        "year",
        "Return True when `year` is a leap year of the Gregorian calendar, else False.",
        "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        [([2024], True), ([1900], False), ([2000], True)],
        [[2023], [2100], [1600], [4]],
    )
    call(
        "count_vowels",
        "easy",
        "text",
        "Return how many of the letters a, e, i, o, u (in either case) `text` has.",
        "def count_vowels(text):\n    return sum(c in 'aeiou' for c in text.lower())",
        [(["Banana"], 3), ([""], 0), (["RHYTHM"], 0)],
        [["AEIOU xyz"], ["The quick brown fox"], ["ooo" * 30]],
    )
    call(
        "digit_sum",
        "easy",
        "n",
        "Return the sum of the decimal digits of the integer `n`, ignoring its sign.",
        "def digit_sum(n):\n    return sum(int(d) for d in str(abs(n)))",
        [([1729], 19), ([-45], 9), ([0], 0)],
        [[999999], [100000], [-1], [31415926535]],
    )
    call(
        "clamp_all",
        "easy",
        "values, low, high",
        "Return the list `values` with every number below `low` replaced by `low` and every one above `high` by `high`.",
        "def clamp_all(values, low, high):\n    return [min(max(v, low), high) for v in values]",
        [([[1, 5, 12], 2, 10], [2, 5, 10]), ([[], 0, 1], [])],
        [[numbers(1, 20), -10, 10], [[3, 3, 3], 3, 3], [[-9, 9], -1, 1]],
    )
    call(
        "running_total",
        "easy",
        "values",
        "Return the list of partial sums of `values`.",
        "def running_total(values):\n    out, total = [], 0\n    for v in values:\n        total += v\n        out.append(total)\n    return out",
        [([[1, 2, 3]], [1, 3, 6]), ([[]], [])],
        [[numbers(2, 30)], [[5]], [[-1, 1, -1, 1]]],
    )
    call(
        "second_largest",
        "easy",
        "values",
        "Return the second largest distinct number of `values`, or None when there is none.",
        "def second_largest(values):\n    distinct = sorted(set(values))\n    return distinct[-2] if len(distinct) > 1 else None",
        [([[4, 9, 9, 2]], 4), ([[7, 7]], None), ([[]], None)],
        [[numbers(3, 25)], [[1, 2]], [[-5, -3, -3, -9]]],
    )
    call(
        "reverse_words",
        "easy",
        "text",
        "Return `text` with the order of its words reversed; words are separated by white space in `text` and by single spaces in the result.",
        "def reverse_words(text):\n    return ' '.join(reversed(text.split()))",
        [(["one two  three"], "three two one"), ([""], "")],
        [["single"], ["  a b c d  "], ["12 34"], ["x\ty\nz"]],
    )
    call(
        "is_palindrome",
        "easy",
        "text",
        "Return whether `text` reads the same in both directions when only its letters and digits count and case does not.",
        "def is_palindrome(text):\n    kept = [c.lower() for c in text if c.isalnum()]\n    return kept == kept[::-1]",
        [(["Never odd or even"], True), (["palindrome"], False)],
        [[""], ["A1b2B1a"], ["ab"], ["No 'x' in Nixon"]],
    )
    call(
        "collatz_steps",
        "easy",
        "n",
        "Starting at the positive integer `n`, halve even numbers and replace odd ones by three times themselves plus one. Return the number of steps until 1 is reached.",
        "def collatz_steps(n):\n    steps = 0\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * n + 1\n        steps += 1\n    return steps",
        [([6], 8), ([1], 0)],
        [[27], [97], [1024], [871]],
    )
    call(
        "flatten_once",
        "easy",
        "lists",
        "Return the elements of the lists in `lists` as one list, in order; inner lists of those lists stay as they are.",
        "def flatten_once(lists):\n    return [x for part in lists for x in part]",
        [([[[1, 2], [], [3]]], [1, 2, 3]), ([[[[1]], [2]]], [[1], 2])],
        [[[]], [[["a"], ["b", "c"]]], [[[1, [2, [3]]], [4]]]],
    )
    call(
        "char_counts",
        "easy",
        "text",
        "Return a dictionary from each character of `text` to how often it occurs.",
        "def char_counts(text):\n    out = {}\n    for c in text:\n        out[c] = out.get(c, 0) + 1\n    return out",
        [(["hello"], {"h": 1, "e": 1, "l": 2, "o": 1}), ([""], {})],
        [["mississippi"], ["a b a"], ["xyzzy"]],
    )
    call(
        "multiples_sum",
        "easy",
        "limit, a, b",
        "Return the sum of the positive integers below `limit` that are multiples of `a` or of `b`.",
        "def multiples_sum(limit, a, b):\n    return sum(i for i in range(1, limit) if i % a == 0 or i % b == 0)",
        [([10, 3, 5], 23), ([1, 2, 3], 0)],
        [[1000, 3, 5], [50, 7, 7], [100, 2, 9]],
    )


def medium_functions() -> None:
    call(
        "merge_intervals",
        "medium",
        "intervals",
        "Each interval is a list [start, end]. Merge those that overlap or touch and return the result sorted by start.",
        "def merge_intervals(intervals):\n    out = []\n    for start, end in sorted(intervals):\n        if out and start <= out[-1][1]:\n            out[-1][1] = max(out[-1][1], end)\n        else:\n            out.append([start, end])\n    return out",
        [([[[1, 3], [2, 6], [8, 9]]], [[1, 6], [8, 9]]), ([[]], [])],
        [[[[5, 7], [1, 5]]], [[[1, 10], [2, 3], [4, 5]]], [[[3, 4], [1, 2], [0, 9], [12, 13]]]],
    )
    call(
        "balanced",
        "medium",
        "text",
        "Return whether the brackets (), [] and {} in `text` are properly nested and closed; other characters do not matter.",
        "def balanced(text):\n    pairs, stack = {')': '(', ']': '[', '}': '{'}, []\n    for c in text:\n        if c in '([{':\n            stack.append(c)\n        elif c in pairs and (not stack or stack.pop() != pairs[c]):\n            return False\n    return not stack",
        [(["a[b(c)]{}"], True), (["(]"], False), (["(("], False)],
        [[""], [")("], ["{[()()]}" * 20], ["([)]"]],
    )
    call(
        "to_roman",
        "medium",
        "n",
        "Return the integer `n` (1 to 3999) as a Roman numeral in capital letters.",
        "def to_roman(n):\n    marks = [(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]\n    out = ''\n    for value, mark in marks:\n        out += mark * (n // value)\n        n %= value\n    return out",
        [([1994], "MCMXCIV"), ([4], "IV"), ([3999], "MMMCMXCIX")],
        [[1], [58], [444], [2026]],
    )
    call(
        "rotate_matrix",
        "medium",
        "matrix",
        "Return the rectangular `matrix` (a list of rows) turned by 90 degrees clockwise.",
        "def rotate_matrix(matrix):\n    return [list(row) for row in zip(*matrix[::-1])]",
        [([[[1, 2], [3, 4]]], [[3, 1], [4, 2]]), ([[[1, 2, 3]]], [[1], [2], [3]])],
        [[[[1]]], [[[1, 2], [3, 4], [5, 6]]], [[["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]]]],
    )
    call(
        "group_anagrams",
        "medium",
        "words",
        "Group the words that are made of the same letters. Return the groups as sorted lists, ordered by their first words.",
        "def group_anagrams(words):\n    groups = {}\n    for word in words:\n        groups.setdefault(''.join(sorted(word)), []).append(word)\n    return sorted(sorted(g) for g in groups.values())",
        [([["tea", "ate", "bat"]], [["ate", "tea"], ["bat"]]), ([[]], [])],
        [[["listen", "silent", "enlist", "google"]], [["a", "b", "a"]], [["abc", "cab", "bca", "xyz", "zyx"]]],
    )
    call(
        "longest_run",
        "medium",
        "values",
        "Return the length of the longest stretch of equal neighbours in `values` (0 for an empty list).",
        "def longest_run(values):\n    best = run = 0\n    last = object()\n    for v in values:\n        run = run + 1 if v == last else 1\n        last = v\n        best = max(best, run)\n    return best",
        [([[1, 1, 2, 2, 2, 1]], 3), ([[]], 0)],
        [[[5]], [[1, 2, 3]], [numbers(4, 60, 0, 2)], [["a"] * 12]],
    )
    call(
        "prime_factors",
        "medium",
        "n",
        "Return the prime factors of `n` (at least 2) in ascending order, each as often as it divides `n`.",
        "def prime_factors(n):\n    out, p = [], 2\n    while p * p <= n:\n        while n % p == 0:\n            out.append(p)\n            n //= p\n        p += 1\n    return out + [n] if n > 1 else out",
        [([360], [2, 2, 2, 3, 3, 5]), ([97], [97])],
        [[2], [1024], [600851475143], [999983 * 2]],
    )
    call(
        "spiral",
        "medium",
        "matrix",
        "Return the elements of the rectangular `matrix` in clockwise spiral order from the top left corner inwards.",
        "def spiral(matrix):\n    out = []\n    rows = [list(r) for r in matrix]\n    while rows:\n        out += rows.pop(0)\n        rows = [list(r) for r in zip(*rows)][::-1]\n    return out",
        [([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], [1, 2, 3, 6, 9, 8, 7, 4, 5]), ([[[1], [2]]], [1, 2])],
        [[[[1, 2, 3, 4]]], [[[1, 2], [3, 4], [5, 6], [7, 8]]], [[[7, 7, 1], [3, 2, 5]]]],
    )
    call(
        "run_length",
        "medium",
        "text",
        "Return `text` run-length encoded: each stretch of equal characters becomes the character followed by its length.",
        "def run_length(text):\n    from itertools import groupby\n    return ''.join(c + str(len(list(g))) for c, g in groupby(text))",
        [(["aaab"], "a3b1"), ([""], "")],
        [["abc"], ["zzzzzzzzzzzz"], ["aabbaa"], ["  x"]],
    )
    call(
        "common_prefix",
        "medium",
        "words",
        "Return the longest text with which every word of the non-empty list `words` begins.",
        "def common_prefix(words):\n    first, last = min(words), max(words)\n    n = 0\n    while n < min(len(first), len(last)) and first[n] == last[n]:\n        n += 1\n    return first[:n]",
        [([["flower", "flow", "flight"]], "fl"), ([["a", "b"]], "")],
        [[["same", "same"]], [["", "x"]], [["interstellar", "internet", "interval"]]],
    )
    call(
        "pairs_with_sum",
        "medium",
        "values, target",
        "Return how many pairs of positions i < j of `values` hold numbers that add up to `target`.",
        "def pairs_with_sum(values, target):\n    seen, count = {}, 0\n    for v in values:\n        count += seen.get(target - v, 0)\n        seen[v] = seen.get(v, 0) + 1\n    return count",
        [([[1, 5, 3, 3], 6], 2), ([[], 0], 0)],
        [[[2, 2, 2], 4], [numbers(5, 200), 0], [numbers(6, 50), 100]],
    )
    call(
        "caesar",
        "medium",
        "text, shift",
        "Return `text` with each ASCII letter moved `shift` places on in the alphabet, wrapping around and keeping its case; `shift` may be negative.",
        "def caesar(text, shift):\n    out = []\n    for c in text:\n        if 'a' <= c <= 'z':\n            c = chr((ord(c) - 97 + shift) % 26 + 97)\n        elif 'A' <= c <= 'Z':\n            c = chr((ord(c) - 65 + shift) % 26 + 65)\n        out.append(c)\n    return ''.join(out)",
        [(["Xyz, abc!", 3], "Abc, def!"), (["b", -1], "a")],
        [["Hello", 0], ["WRAP around", 52], ["Test 123", -30]],
    )


def hard_functions() -> None:
    call(
        "edit_distance",
        "hard",
        "a, b",
        "Return the least number of single-character insertions, deletions and replacements that turn `a` into `b`.",
        "def edit_distance(a, b):\n    row = list(range(len(b) + 1))\n    for i, x in enumerate(a, 1):\n        last, row[0] = row[0], i\n        for j, y in enumerate(b, 1):\n            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))\n    return row[-1]",
        [(["kitten", "sitting"], 3), (["", "abc"], 3)],
        [["same", "same"], ["intention", "execution"], ["a" * 40, "ab" * 20]],
    )
    call(
        "longest_increasing",
        "hard",
        "values",
        "Return the length of the longest strictly increasing subsequence of `values`. There may be 2000 values.",
        "def longest_increasing(values):\n    from bisect import bisect_left\n    tails = []\n    for v in values:\n        i = bisect_left(tails, v)\n        tails[i:i + 1] = [v]\n    return len(tails)",
        [([[10, 9, 2, 5, 3, 7, 101, 18]], 4), ([[]], 0)],
        [[[7, 7, 7]], [numbers(7, 2000, 0, 10000)], [list(range(50))]],
    )
    call(
        "word_break",
        "hard",
        "text, words",
        "Return whether `text` can be split into words of the list `words`, each usable any number of times. The empty text can.",
        "def word_break(text, words):\n    good = [True] + [False] * len(text)\n    for i in range(1, len(text) + 1):\n        good[i] = any(good[i - len(w)] and text[:i].endswith(w) for w in words if w and len(w) <= i)\n    return good[-1]",
        [(["applepen", ["apple", "pen"]], True), (["catsandog", ["cats", "dog", "sand", "and", "cat"]], False)],
        [["", ["a"]], ["a" * 60 + "b", ["a", "aa", "aaa"]], ["abcab", ["ab", "c"]]],
    )
    call(
        "eval_expression",
        "hard",
        "text",
        "Return the integer value of an expression of non-negative integers, +, -, * and parentheses, with the usual precedence; there may be spaces. Do not use eval.",
        "def eval_expression(text):\n    import re\n    tokens = re.findall(r'\\d+|[-+*()]', text)\n    pos = 0\n\n    def atom():\n        nonlocal pos\n        token = tokens[pos]\n        pos += 1\n        if token == '(':\n            value = total()\n            pos += 1\n            return value\n        return int(token)\n\n    def product():\n        nonlocal pos\n        value = atom()\n        while pos < len(tokens) and tokens[pos] == '*':\n            pos += 1\n            value *= atom()\n        return value\n\n    def total():\n        nonlocal pos\n        value = product()\n        while pos < len(tokens) and tokens[pos] in '+-':\n            sign = 1 if tokens[pos] == '+' else -1\n            pos += 1\n            value += sign * product()\n        return value\n\n    return total()",
        [(["2 * (3 + 4) - 5"], 9), (["7"], 7)],
        [["1+2*3-4*5"], ["((2))*((3))"], ["10-(2-(3-4))"], ["100 * 100 - 1"]],
    )
    call(
        "min_coins",
        "hard",
        "coins, amount",
        "Return the least number of coins, of the values in `coins` and any number of each, that add up to `amount`, or -1 when none do.",
        "def min_coins(coins, amount):\n    best = [0] + [None] * amount\n    for a in range(1, amount + 1):\n        options = [best[a - c] for c in coins if c <= a and best[a - c] is not None]\n        best[a] = min(options) + 1 if options else None\n    return -1 if best[amount] is None else best[amount]",
        [([[1, 3, 4], 6], 2), ([[2], 3], -1), ([[5], 0], 0)],
        [[[1, 5, 10, 25], 99], [[7, 11], 24], [[186, 419, 83, 408], 6249]],
    )
    call(
        "topological_order",
        "hard",
        "n, edges",
        "The tasks 0 to n-1 must be ordered so that a comes before b for each pair [a, b] of `edges`. Return the order that is first when orders are compared as lists, or [] when there is none.",
        "def topological_order(n, edges):\n    import heapq\n    need, after = [0] * n, [[] for _ in range(n)]\n    for a, b in edges:\n        need[b] += 1\n        after[a].append(b)\n    ready = [i for i in range(n) if not need[i]]\n    out = []\n    while ready:\n        a = heapq.heappop(ready)\n        out.append(a)\n        for b in after[a]:\n            need[b] -= 1\n            if not need[b]:\n                heapq.heappush(ready, b)\n    return out if len(out) == n else []",
        [([4, [[3, 0], [0, 1]]], [2, 3, 0, 1]), ([2, [[0, 1], [1, 0]]], [])],
        [[3, []], [5, [[4, 3], [3, 2], [2, 1], [1, 0]]], [6, [[5, 0], [5, 2], [4, 0], [4, 1], [2, 3], [3, 1]]]],
    )
    call(
        "max_rectangle",
        "hard",
        "heights",
        "`heights` are the heights of bars of width 1 side by side. Return the area of the largest rectangle that fits inside them. There may be 5000 bars.",
        "def max_rectangle(heights):\n    best, stack = 0, []\n    for i, h in enumerate(list(heights) + [0]):\n        start = i\n        while stack and stack[-1][1] >= h:\n            start, top = stack.pop()\n            best = max(best, top * (i - start))\n        stack.append((start, h))\n    return best",
        [([[2, 1, 5, 6, 2, 3]], 10), ([[]], 0)],
        [[[4, 4, 4]], [numbers(8, 5000, 0, 1000)], [[1, 2, 3, 4, 5]]],
    )


def easy_programs() -> None:
    stdin(
        "sum_of_line",
        "easy",
        "Read one line of integers separated by spaces and print their sum.",
        "print(sum(map(int, input().split())))",
        [("1 2 3\n", "6"), ("-5 5\n", "0")],
        ["7\n", "100 200 300 400\n", "-1 -2 -3\n"],
    )
    stdin(
        "fizzbuzz",
        "easy",
        "Read n and print the numbers from 1 to n, one a line, with Fizz in place of multiples of 3, Buzz in place of multiples of 5 and FizzBuzz in place of multiples of both.",
        "for i in range(1, int(input()) + 1):\n    print('Fizz' * (i % 3 == 0) + 'Buzz' * (i % 5 == 0) or i)",
        [("5\n", "1\n2\nFizz\n4\nBuzz")],
        ["1\n", "15\n", "30\n", "100\n"],
    )
    stdin(
        "temperature",
        "easy",
        "Read a temperature in degrees Celsius, a whole number, and print it in degrees Fahrenheit with one decimal.",
        "print(f'{int(input()) * 9 / 5 + 32:.1f}')",
        [("100\n", "212.0"), ("-40\n", "-40.0")],
        ["0\n", "37\n", "21\n"],
    )
    stdin(
        "line_lengths",
        "easy",
        "Read lines until the end of the input and print the length of each, without its line break.",
        "import sys\nfor line in sys.stdin:\n    print(len(line.rstrip('\\n')))",
        [("ab\n\nxyz w\n", "2\n0\n5")],
        ["one\n", "a\nbb\nccc\n", "   \n", "x" * 300 + "\n"],
    )
    stdin(
        "min_max",
        "easy",
        "The first line is n, the next n lines hold one integer each. Print the smallest and the largest, separated by a space.",
        "v = [int(input()) for _ in range(int(input()))]\nprint(min(v), max(v))",
        [("3\n4\n-2\n9\n", "-2 9")],
        ["1\n5\n", "2\n7\n7\n", "5\n" + "\n".join(map(str, numbers(9, 5))) + "\n", "4\n-1\n-2\n-3\n-4\n"],
    )
    stdin(
        "triangle_kind",
        "easy",
        "Read three positive integers a b c on one line. Print `none` when no triangle of positive area has these sides, else `equilateral`, `isosceles` or `scalene`.",
        "a, b, c = sorted(map(int, input().split()))\nprint('none' if a + b <= c else {1: 'equilateral', 2: 'isosceles', 3: 'scalene'}[len({a, b, c})])",
        [("3 4 5\n", "scalene"), ("1 2 3\n", "none"), ("2 2 3\n", "isosceles")],
        ["5 5 5\n", "10 1 1\n", "7 10 5\n"],
    )
    stdin(
        "swap_case",
        "easy",
        "Read one line and print it with small letters made capital and capital letters made small.",
        "print(input().swapcase())",
        [("Hello World\n", "hELLO wORLD")],
        ["abc\n", "XYZ 123\n", "a1B2\n", "!\n"],
    )
    stdin(
        "number_triangle",
        "easy",
        "Read n and print n lines, of which line k holds the numbers 1 to k separated by spaces.",
        "for k in range(1, int(input()) + 1):\n    print(*range(1, k + 1))",
        [("3\n", "1\n1 2\n1 2 3")],
        ["1\n", "5\n", "9\n", "12\n"],
    )
    stdin(
        "mean_of_marks",
        "easy",
        "The first line is n, the second holds n whole marks. Print their mean with two decimals.",
        "n = int(input())\nv = list(map(int, input().split()))\nprint(f'{sum(v) / n:.2f}')",
        [("4\n1 2 3 5\n", "2.75")],
        ["1\n7\n", "3\n1 1 2\n", "2\n0 9\n", "8\n1 2 3 4 5 6 7 9\n"],
    )
    stdin(
        "acronym",
        "easy",
        "Read one line of words and print the first letters of the words, in capitals, without spaces.",
        "print(''.join(w[0] for w in input().split()).upper())",
        [("portable network graphics\n", "PNG")],
        ["one\n", "A b C d\n", "laugh out  loud\n", "first in first out\n"],
    )
    stdin(
        "odd_even_counts",
        "easy",
        "Read integers separated by white space until the end of the input. Print how many are odd and how many are even, separated by a space.",
        "import sys\nv = list(map(int, sys.stdin.read().split()))\nodd = sum(x % 2 for x in v)\nprint(odd, len(v) - odd)",
        [("1 2 3\n4 5\n", "3 2"), ("", "0 0")],
        ["-1 -2\n", "8\n", " ".join(map(str, numbers(10, 99))) + "\n"],
    )
    stdin(
        "clock_sum",
        "easy",
        "Read two times hh:mm on one line and print their sum as a time of day hh:mm, past midnight starting again at 00:00.",
        "a, b = input().split()\nf = lambda t: int(t[:2]) * 60 + int(t[3:])\nm = (f(a) + f(b)) % 1440\nprint(f'{m // 60:02}:{m % 60:02}')",
        [("22:30 03:45\n", "02:15")],
        ["00:00 00:00\n", "12:59 00:01\n", "23:59 23:59\n", "09:05 01:07\n"],
    )


def medium_programs() -> None:
    stdin(
        "word_frequency",
        "medium",
        "Read text until the end of the input. Words are separated by white space and small and capital letters are alike. Print each word in small letters with its count, the most frequent first and equal ones in alphabetical order.",
        "import sys\nfrom collections import Counter\nc = Counter(sys.stdin.read().lower().split())\nfor w in sorted(c, key=lambda w: (-c[w], w)):\n    print(w, c[w])",
        [("the cat The dog\n", "the 2\ncat 1\ndog 1")],
        ["a\n", "b a b a c\n", "x y\nz X\n", "to be or not to be\n"],
    )
    stdin(
        "sieve",
        "medium",
        "Read n (up to 100000) and print how many primes are at most n.",
        "n = int(input())\ns = bytearray([1]) * (n + 1)\ns[:2] = bytes(min(2, n + 1))\nfor i in range(2, int(n ** 0.5) + 1):\n    if s[i]:\n        s[i * i::i] = bytes(len(range(i * i, n + 1, i)))\nprint(sum(s))",
        [("10\n", "4"), ("1\n", "0")],
        ["2\n", "100\n", "100000\n", "7919\n"],
    )
    stdin(
        "matrix_product",
        "medium",
        "The first line is n, then come the n rows of a matrix A and the n rows of a matrix B. Print the n rows of the product AB.",
        "n = int(input())\nread = lambda: [list(map(int, input().split())) for _ in range(n)]\na, b = read(), read()\nfor row in a:\n    print(*(sum(x * y for x, y in zip(row, col)) for col in zip(*b)))",
        [("2\n1 2\n3 4\n0 1\n1 0\n", "2 1\n4 3")],
        [
            "1\n3\n-4\n",
            "2\n1 0\n0 1\n5 6\n7 8\n",
            "3\n1 2 3\n4 5 6\n7 8 9\n1 1 1\n2 2 2\n3 3 3\n",
            "2\n-1 0\n0 -1\n9 8\n7 6\n",
        ],
    )
    stdin(
        "binary_search_steps",
        "medium",
        "The first line holds a sorted list of distinct integers, the second a number of queries q, then follow q integers, one a line. For each print its position in the list, counted from 0, or -1 when it is not there.",
        "v = list(map(int, input().split()))\nwhere = {x: i for i, x in enumerate(v)}\nfor _ in range(int(input())):\n    print(where.get(int(input()), -1))",
        [("1 3 5 7\n3\n5\n2\n7\n", "2\n-1\n3")],
        ["4\n2\n4\n5\n", "-3 -1 0 8\n4\n-3\n8\n0\n1\n", "10 20 30\n1\n20\n", "1 2\n2\n3\n1\n"],
    )
    stdin(
        "grid_paths",
        "medium",
        "A grid is given as lines of `.` (free) and `#` (wall). Moving only right and down on free cells, print how many ways lead from the top left to the bottom right cell (0 when either is a wall).",
        "import sys\ng = sys.stdin.read().split()\nw = [0] * len(g[0])\nw[0] = 1\nfor row in g:\n    for j, c in enumerate(row):\n        w[j] = 0 if c == '#' else w[j] + (w[j - 1] if j else 0)\nprint(w[-1])",
        [("..\n..\n", "2"), (".#\n#.\n", "0")],
        [".\n", "#\n", "...\n.#.\n...\n", "\n".join(["." * 10] * 10) + "\n"],
    )
    stdin(
        "base_convert",
        "medium",
        "Read a non-negative decimal integer and a base from 2 to 16 on one line and print the number in that base with digits 0-9 and a-f.",
        "n, b = map(int, input().split())\nout = ''\nwhile n or not out:\n    out = '0123456789abcdef'[n % b] + out\n    n //= b\nprint(out)",
        [("255 16\n", "ff"), ("0 2\n", "0")],
        ["10 2\n", "123456789 7\n", "15 16\n", "1000000 12\n"],
    )
    stdin(
        "bank_ledger",
        "medium",
        "Each line is `open NAME`, `put NAME AMOUNT` or `take NAME AMOUNT`. Accounts open with 0; a `take` of more than there is, and anything on an account that was not opened, changes nothing. At the end print each account as `NAME BALANCE` in alphabetical order.",
        "import sys\na = {}\nfor line in sys.stdin:\n    word, name, *rest = line.split()\n    if word == 'open':\n        a.setdefault(name, 0)\n    elif name in a and word == 'put':\n        a[name] += int(rest[0])\n    elif name in a and a[name] >= int(rest[0]):\n        a[name] -= int(rest[0])\nfor name in sorted(a):\n    print(name, a[name])",
        [("open bo\nput bo 5\ntake bo 7\nput al 1\n", "bo 5")],
        [
            "open x\n",
            "open b\nopen a\nput a 3\nput b 4\ntake b 4\n",
            "put q 1\nopen q\nput q 2\n",
            "open z\nput z 9\nopen z\ntake z 1\n",
        ],
    )
    stdin(
        "longest_word_chain",
        "medium",
        "Read words separated by white space. Print the length of the longest stretch of neighbouring words in which each begins with the last letter of the one before.",
        "import sys\nw = sys.stdin.read().split()\nbest = run = 1\nfor a, b in zip(w, w[1:]):\n    run = run + 1 if a[-1] == b[0] else 1\n    best = max(best, run)\nprint(best)",
        [("tea apple eel cat\n", "3")],
        ["one\n", "a a a a\n", "ab bc cd xx xy yz za ab\n", "no no\n"],
    )
    stdin(
        "columns_total",
        "medium",
        "The input is a table: a header of column names separated by commas, then rows of integers separated by commas. Print each column's name and sum as `NAME SUM`, in the order of the header.",
        "import sys\nrows = [line.split(',') for line in sys.stdin.read().split()]\nfor name, *column in zip(*rows):\n    print(name, sum(map(int, column)))",
        [("a,b\n1,2\n3,4\n", "a 4\nb 6")],
        ["x\n5\n", "p,q,r\n1,1,1\n", "m,n\n-1,1\n-2,2\n-3,3\n", "k,l\n"],
    )
    stdin(
        "josephus",
        "medium",
        "n people numbered 1 to n stand in a circle; beginning with person 1, every k-th is sent away until one is left. Read n and k on one line and print the number of the last.",
        "n, k = map(int, input().split())\np = 0\nfor i in range(2, n + 1):\n    p = (p + k) % i\nprint(p + 1)",
        [("7 3\n", "4"), ("1 5\n", "1")],
        ["41 3\n", "10 1\n", "1000 7\n", "6 6\n"],
    )
    stdin(
        "rle_decode",
        "medium",
        "A line holds numbers each followed by one letter, such as 3a2b. Print each letter as many times as its number says.",
        "import re\nprint(''.join(int(n) * c for n, c in re.findall(r'(\\d+)([A-Za-z])', input())))",
        [("3a2b\n", "aaabb")],
        ["1x\n", "10z\n", "2a0b1c\n", "12Q3q\n"],
    )
    stdin(
        "sliding_max",
        "medium",
        "The first line holds k, the second a list of integers of at least k. Print the largest number of each stretch of k neighbours, separated by spaces.",
        "k = int(input())\nv = list(map(int, input().split()))\nprint(*(max(v[i:i + k]) for i in range(len(v) - k + 1)))",
        [("3\n1 3 -1 -3 5 3\n", "3 3 5 5")],
        ["1\n4 5\n", "2\n9 8 7\n", "4\n1 2 3 4\n", "5\n" + " ".join(map(str, numbers(11, 40))) + "\n"],
    )


def hard_programs() -> None:
    stdin(
        "shortest_maze",
        "hard",
        "A maze is given as lines of `.` (free), `#` (wall), one `S` and one `E`. Moving up, down, left and right, print the least number of moves from S to E, or -1.",
        "import sys\nfrom collections import deque\ng = sys.stdin.read().split()\nfind = lambda c: next((i, r.index(c)) for i, r in enumerate(g) if c in r)\nstart, end = find('S'), find('E')\nd = {start: 0}\nq = deque([start])\nwhile q:\n    i, j = q.popleft()\n    for n in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):\n        if 0 <= n[0] < len(g) and 0 <= n[1] < len(g[0]) and g[n[0]][n[1]] != '#' and n not in d:\n            d[n] = d[i, j] + 1\n            q.append(n)\nprint(d.get(end, -1))",
        [("S.#\n.#E\n...\n", "5"), ("S#E\n", "-1")],
        [
            "SE\n",
            "S..\n###\n..E\n",
            "S....\n.###.\n...#E\n",
            "\n".join(["S" + "." * 29] + ["." * 30] * 28 + ["." * 29 + "E"]) + "\n",
        ],
    )
    stdin(
        "dijkstra",
        "hard",
        "The first line holds n, m, s and t; then follow m lines `a b w`: a road in both directions of length w between places a and b, numbered 1 to n. Print the length of the shortest way from s to t, or -1.",
        "import heapq, sys\nn, m, s, t, *r = map(int, sys.stdin.read().split())\ng = [[] for _ in range(n + 1)]\nfor a, b, w in zip(r[::3], r[1::3], r[2::3]):\n    g[a].append((b, w))\n    g[b].append((a, w))\nbest, q = {}, [(0, s)]\nwhile q:\n    d, a = heapq.heappop(q)\n    if a not in best:\n        best[a] = d\n        for b, w in g[a]:\n            heapq.heappush(q, (d + w, b))\nprint(best.get(t, -1))",
        [("3 3 1 3\n1 2 4\n2 3 1\n1 3 9\n", "5"), ("2 0 1 2\n", "-1")],
        ["1 0 1 1\n", "4 4 1 4\n1 2 1\n2 3 1\n3 4 1\n1 4 4\n", "5 5 2 5\n1 2 7\n1 3 2\n3 4 3\n4 5 1\n2 4 10\n"],
    )
    stdin(
        "knapsack",
        "hard",
        "The first line holds n and the capacity C; then follow n lines `weight value`. Print the largest total value of things whose weights add up to at most C, each taken once at most.",
        "n, c = map(int, input().split())\nbest = [0] * (c + 1)\nfor _ in range(n):\n    w, v = map(int, input().split())\n    for k in range(c, w - 1, -1):\n        best[k] = max(best[k], best[k - w] + v)\nprint(best[c])",
        [("3 5\n2 3\n3 4\n4 5\n", "7")],
        [
            "1 1\n2 9\n",
            "2 10\n5 10\n5 10\n",
            "4 7\n1 1\n3 4\n4 5\n5 7\n",
            "5 100\n10 60\n20 100\n30 120\n40 10\n50 130\n",
        ],
    )
    stdin(
        "common_subsequence",
        "hard",
        "Read two lines and print the length of their longest common subsequence.",
        "a, b = input(), input()\nrow = [0] * (len(b) + 1)\nfor x in a:\n    new = [0]\n    for j, y in enumerate(b):\n        new.append(row[j] + 1 if x == y else max(row[j + 1], new[j]))\n    row = new\nprint(row[-1])",
        [("abcbdab\nbdcaba\n", "4"), ("abc\nxyz\n", "0")],
        ["same\nsame\n", "a\naaaa\n", "programming\ngaming\n"],
    )
    stdin(
        "count_islands",
        "hard",
        "A map is given as lines of `#` (land) and `.` (water). Land cells that share a side belong together. Print the number of islands and the size of the largest, separated by a space (0 0 without land).",
        "import sys\ng = sys.stdin.read().split()\nland = {(i, j) for i, r in enumerate(g) for j, c in enumerate(r) if c == '#'}\nsizes = []\nwhile land:\n    stack, size = [land.pop()], 0\n    while stack:\n        i, j = stack.pop()\n        size += 1\n        for n in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):\n            if n in land:\n                land.remove(n)\n                stack.append(n)\n    sizes.append(size)\nprint(len(sizes), max(sizes, default=0))",
        [("##.\n..#\n", "2 2"), ("..\n", "0 0")],
        ["#\n", "#.#\n.#.\n#.#\n", "\n".join(["#" * 40] * 40) + "\n"],
    )
    stdin(
        "stack_machine",
        "hard",
        "Each line is an instruction of a stack machine: `push N`, `add`, `sub`, `mul`, `dup`, `swap`, `pop` or `print` (prints the top and leaves it). Binary ones take b from the top, then a, and push a+b, a-b or a*b. When an instruction finds too few values, print `error at line L`, counted from 1, and stop.",
        "import sys\nst = []\nneed = {'push': 0, 'add': 2, 'sub': 2, 'mul': 2, 'dup': 1, 'swap': 2, 'pop': 1, 'print': 1}\nfor n, line in enumerate(sys.stdin, 1):\n    op, *arg = line.split()\n    if len(st) < need[op]:\n        print(f'error at line {n}')\n        break\n    if op == 'push':\n        st.append(int(arg[0]))\n    elif op == 'dup':\n        st.append(st[-1])\n    elif op == 'swap':\n        st[-1], st[-2] = st[-2], st[-1]\n    elif op == 'pop':\n        st.pop()\n    elif op == 'print':\n        print(st[-1])\n    else:\n        b, a = st.pop(), st.pop()\n        st.append(a + b if op == 'add' else a - b if op == 'sub' else a * b)",
        [("push 2\npush 5\nsub\nprint\nadd\n", "-3\nerror at line 5")],
        ["push 7\ndup\nmul\nprint\n", "pop\n", "push 1\npush 2\nswap\nsub\nprint\n", "push 3\nprint\nprint\nswap\n"],
    )
    stdin(
        "team_split",
        "hard",
        "The first line holds n and m; then follow m lines `a b`: the people a and b (1 to n) must not be in one team. Print `yes` when everybody can be put into one of two teams, else `no`.",
        "import sys\nn, m, *r = map(int, sys.stdin.read().split())\ng = [[] for _ in range(n + 1)]\nfor a, b in zip(r[::2], r[1::2]):\n    g[a].append(b)\n    g[b].append(a)\nside = {}\nok = True\nfor s in range(1, n + 1):\n    if s in side:\n        continue\n    side[s] = 0\n    stack = [s]\n    while stack:\n        a = stack.pop()\n        for b in g[a]:\n            if b not in side:\n                side[b] = 1 - side[a]\n                stack.append(b)\n            elif side[b] == side[a]:\n                ok = False\nprint('yes' if ok else 'no')",
        [("3 2\n1 2\n2 3\n", "yes"), ("3 3\n1 2\n2 3\n3 1\n", "no")],
        ["1 0\n", "4 4\n1 2\n2 3\n3 4\n4 1\n", "5 5\n1 2\n2 3\n3 4\n4 5\n5 1\n", "6 3\n1 4\n2 5\n3 6\n"],
    )


# fmt: on


def main() -> None:
    for make in (easy_functions, medium_functions, hard_functions, easy_programs, medium_programs, hard_programs):
        make()
    names = [p["id"] for p in PROBLEMS]
    assert len(set(names)) == len(names) >= 60, len(names)
    OUT.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in PROBLEMS), encoding="utf-8")
    print(f"{len(names)} problems in {OUT.name}")


if __name__ == "__main__":
    main()
