"use strict";
// One group: the question, then every response with its numbers and its tokens coloured.

G.detail = (function () {
  const ZERO = 5e-6; // log-ratios up to here are rounding
  const FULL = 0.1; // the log-ratio of full colour, about 10 % more or less likely, unless the group has larger ones
  const MANY = 6000; // with more tokens in a group, responses are plain text until the reader asks for tokens
  const KINDS = {
    update: {
      label: "log-ratio π_θ / π_old",
      text: "blue: the update made the token more likely, orange: less",
      values: "log_updates",
    },
    ratio: {
      label: "log-ratio π_old / μ",
      text: "blue: more likely under the old policy than when sampled, orange: less",
      values: "log_ratios",
    },
    surprise: { label: "surprise (1 − p)", text: "darker: less likely when sampled", values: "log_probs" },
  };
  let preferred = null; // what the reader chose

  // A report stores integers, the run folder log-probs: convert both to `log_probs`, `log_ratios`, `log_updates`.
  function unpack(response) {
    const { log_probs: behaviour, old_log_probs: old, new_log_probs: fresh } = response;
    const minus = (a, b) => (a && a.length && b && a.length === b.length ? a.map((v, i) => v - b[i]) : null);
    if (response.mlp) response.log_probs = response.mlp.map((v) => v / 1e3);
    response.log_ratios = response.mlr ? response.mlr.map((v) => v / 1e6) : minus(old, behaviour);
    response.log_updates = response.mln ? response.mln.map((v) => v / 1e6) : minus(fresh, old);
  }

  function scaleOf(record, kind) {
    let top = 0;
    for (const response of record.responses)
      for (const v of response[KINDS[kind].values] || []) top = Math.max(top, Math.abs(v));
    return top;
  }

  // The reader's choice if this group has it, else the first log-ratio that is not zero throughout.
  function choose(record) {
    const known = Object.keys(KINDS).filter((k) => record.responses.some((r) => r[KINDS[k].values]));
    if (known.includes(preferred)) return preferred;
    return known.find((k) => k !== "surprise" && scaleOf(record, k) > ZERO) || known[0] || "surprise";
  }

  function paint(span, response, i, { kind, scale }) {
    const value = (response[KINDS[kind].values] || [])[i];
    if (value === undefined || value === null) return;
    const surprise = kind === "surprise";
    const strength = surprise ? 1 - Math.exp(Math.min(0, value)) : scale > 0 ? Math.abs(value) / scale : 0;
    const color = surprise ? "--token-rare" : value >= 0 ? "--token-up" : "--token-down";
    if (strength > 0.01) span.style.backgroundColor = G.alpha(G.css(color), 0.06 + 0.7 * Math.sqrt(strength));
  }

  // The tokens of a response, or of one of its turns, with a line for the numbers of the current one.
  function tokens(response, look, { start, end } = { start: 0, end: response.tokens.length }) {
    const readout = G.h("p", { class: "readout", "aria-live": "polite", hidden: true });
    const spans = response.tokens.slice(start, end).map((text, i) => {
      const span = G.h("span", { class: "token" }, /^\n+$/.test(text) ? "↵" + text : text);
      paint(span, response, start + i, look);
      return span;
    });
    let at = -1;
    const read = (i) => {
      if (i < 0 || i >= spans.length) return;
      if (spans[at]) spans[at].classList.remove("current");
      at = i;
      spans[i].classList.add("current");
      const place = start + i;
      const parts = [`token ${place + 1} ${JSON.stringify(response.tokens[place])}`];
      if (response.log_probs)
        parts.push(
          `log-prob ${G.number(response.log_probs[place])} (${G.percent(Math.exp(response.log_probs[place]))})`,
        );
      if (response.log_updates) parts.push(`log π_θ/π_old ${G.number(response.log_updates[place])}`);
      if (response.log_ratios) parts.push(`log π_old/μ ${G.number(response.log_ratios[place])}`);
      readout.hidden = false;
      readout.textContent = parts.join(" · ");
    };
    const box = G.h(
      "div",
      { class: "text tokens", tabindex: "0", role: "group", "aria-label": "Response tokens" },
      spans,
    );
    box.addEventListener("pointerover", (e) => read(spans.indexOf(e.target)));
    box.addEventListener("keydown", (e) => {
      const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[e.key];
      if (move === undefined) return;
      e.preventDefault();
      read(Math.max(0, Math.min(spans.length - 1, at + move)));
    });
    return [box, readout];
  }

  function numbers(response, overview) {
    const facts = [];
    const push = (label, value, more) =>
      facts.push(
        G.h(
          "span",
          { class: "fact" },
          G.h("span", { class: "k" }, label),
          " ",
          G.h("span", { class: "v " + (more || "") }, value),
        ),
      );
    if (response.score !== null && response.score !== undefined) push("reward", G.number(response.score));
    if (response.advantage !== null && response.advantage !== undefined)
      push(
        "advantage",
        (response.advantage > 0 ? "+" : "") + G.number(response.advantage),
        response.advantage > 0 ? "up" : response.advantage < 0 ? "down" : "",
      );
    if (response.ratio !== null && response.ratio !== undefined) push("ratio", response.ratio.toFixed(5));
    push("tokens", G.number(response.num_tokens));
    if (response.finish_reason)
      push("end", response.finish_reason === "length" ? "cut at the length limit" : response.finish_reason);
    for (const [key, value] of Object.entries(response.extra || {}))
      push(key, typeof value === "number" ? G.number(value) : String(value));
    return facts;
  }

  // What a judge said, by its name: the verdict and the reason.
  function opinions(response) {
    return Object.entries(response.notes || {}).map(([name, note]) =>
      G.h(
        "div",
        { class: "opinion" },
        G.h("span", { class: "k" }, name),
        " ",
        G.h("span", { class: "v" }, typeof note.verdict === "string" ? note.verdict : JSON.stringify(note.verdict)),
        note.reason ? ` · ${note.reason}` : "",
      ),
    );
  }

  function verdict(response) {
    if (response.failure) return G.h("span", { class: "mark bad" }, "reward failed");
    const { acc, score, advantage } = response;
    const known = acc ?? score;
    if (known === null || known === undefined) return G.h("span", { class: "mark" }, "not scored");
    // Without an accuracy, a reward of another scale than 0 or 1 is judged by its advantage in the group.
    const isShare = acc !== null && acc !== undefined ? acc >= 0 && acc <= 1 : score === 0 || score === 1;
    if (!isShare) {
      const tone = advantage > 0 ? "good" : advantage < 0 ? "bad" : "";
      const words = advantage > 0 ? "above its group" : advantage < 0 ? "below its group" : "reward";
      return G.h("span", { class: `mark ${tone}` }, `${words}: ${G.number(score ?? acc, 3)}`);
    }
    const value = known;
    if (value >= 1) return G.h("span", { class: "mark good" }, "right");
    return G.h("span", { class: "mark bad" }, value > 0 ? `part ${G.number(value, 3)}` : "wrong");
  }

  function card(response, i, look, plain) {
    const body = G.h("div", {});
    const written = (asTokens, part) =>
      asTokens ? tokens(response, look, part) : G.h("div", { class: "text" }, (part || response).text || "(empty)");
    const fill = (asTokens) =>
      G.replace(
        body,
        Array.isArray(response.turns) && response.turns.length
          ? G.turns(response.turns, (turn) => written(asTokens, turn))
          : written(asTokens),
      );
    const able = Array.isArray(response.tokens) && response.tokens.length > 0;
    fill(able && !plain);
    return G.h(
      "article",
      { class: "response", "aria-label": `Response ${i + 1}` },
      G.h(
        "div",
        { class: "facts" },
        G.h("strong", {}, `#${i + 1}`),
        verdict(response),
        numbers(response),
        able &&
          plain &&
          G.h("button", { type: "button", class: "quiet small", onclick: () => fill(true) }, "tokens"),
      ),
      body,
      opinions(response),
      response.failure && G.h("p", { class: "failure" }, response.failure),
    );
  }

  function legend(record, look, redraw) {
    const known = Object.keys(KINDS).filter((k) => record.responses.some((r) => r[KINDS[k].values]));
    const select = G.h(
      "select",
      {
        "aria-label": "Colour tokens by",
        onchange: (e) => {
          preferred = e.target.value;
          redraw();
        },
      },
      known.map((k) => G.h("option", { value: k }, KINDS[k].label)),
    );
    select.value = look.kind;
    const { text } = KINDS[look.kind];
    const scale =
      look.kind === "surprise"
        ? ""
        : look.top <= ZERO
          ? ". Here all are 0"
          : `; full colour at ±${G.number(look.scale, 2)}, the largest here is ${G.number(look.top, 2)}`;
    return G.h(
      "div",
      { class: "legend" },
      G.h("label", {}, "Colour tokens by ", select),
      G.h(
        "span",
        { class: "note" },
        `${text}${scale}. Point at a token, or use the arrow keys in a response, for its numbers.`,
      ),
    );
  }

  const content = (value) =>
    typeof value === "string"
      ? value
      : Array.isArray(value)
        ? value.map((p) => p.text ?? JSON.stringify(p)).join("\n")
        : JSON.stringify(value);

  return function detail(record, group, browser) {
    const fate = G.fate(group.fate);
    record.responses.forEach(unpack);
    const plain = record.responses.reduce((sum, r) => sum + (r.num_tokens || 0), 0) > MANY;
    const trained = record.responses.some((r) => Array.isArray(r.tokens));
    const cards = G.h("div", { class: "responses" });
    const holder = G.h("div", {});
    const draw = () => {
      const kind = choose(record);
      const top = scaleOf(record, kind);
      const look = { kind, top, scale: Math.max(top, FULL) };
      G.replace(holder, trained && legend(record, look, draw));
      G.replace(
        cards,
        record.responses.map((r, i) => card(r, i, look, plain)),
      );
    };
    draw();
    const pill = G.h("span", { class: "pill" }, fate.label);
    pill.style.setProperty("--pill", G.css(fate.color));
    return [
      G.h(
        "div",
        { class: "detail-head" },
        G.h("div", { class: "line" }, pill, G.h("span", { class: "note" }, fate.text)),
        G.h(
          "div",
          { class: "tools" },
          G.h(
            "button",
            { type: "button", class: "quiet small", onclick: () => browser.step(-1) },
            "Previous",
          ),
          G.h("button", { type: "button", class: "quiet small", onclick: () => browser.step(1) }, "Next"),
        ),
      ),
      G.h("h3", { class: "sr" }, `Group ${group.uid} of step ${group.step}`),
      G.h(
        "dl",
        { class: "about" },
        [
          ["step", group.step],
          ["uid", group.uid],
          ["source", group.source],
          ["weights version", record.version],
          [
            "right answer",
            record.ground_truth === null || record.ground_truth === undefined
              ? null
              : content(record.ground_truth),
          ],
        ]
          .filter(([, v]) => v !== null && v !== undefined && v !== "")
          .map(([k, v]) => G.h("div", {}, G.h("dt", {}, k), G.h("dd", {}, v))),
      ),
      (record.messages || []).map((m) =>
        G.h(
          "div",
          { class: "message" },
          G.h("span", { class: "role" }, m.role),
          G.h("div", { class: "text" }, content(m.content)),
        ),
      ),
      holder,
      cards,
    ];
  };
})();
