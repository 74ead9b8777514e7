"use strict";
// A response of several turns. Turns and answers of the environment can be folded; the answers are grey.

G.turns = (function () {
  const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

  function facts(turn, i) {
    const parts = [`turn ${i + 1}`];
    if (turn.reward !== null && turn.reward !== undefined) parts.push(`reward ${G.number(turn.reward)}`);
    if (turn.calls) parts.push(count(turn.calls, "call"));
    if (turn.errors) parts.push(count(turn.errors, "error"));
    if (turn.malformed) parts.push("a call that cannot be read");
    return parts.join(" · ");
  }

  function observation(text) {
    return G.h(
      "details",
      { class: "observation", open: true },
      G.h("summary", {}, "environment"),
      G.h("div", { class: "text" }, text),
    );
  }

  // `written(turn)` is what the model wrote in a turn.
  return function turns(list, written) {
    return list.map((turn, i) =>
      G.h(
        "details",
        { class: "turn", open: true },
        G.h("summary", {}, facts(turn, i)),
        written(turn),
        turn.observation && observation(turn.observation),
      ),
    );
  };
})();
