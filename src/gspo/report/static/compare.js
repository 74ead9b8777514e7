"use strict";
// Runs side by side: the same curves over steps, tokens or time, the differences of result and of config.

G.CompareView = class {
  constructor(names, overviews, comparison) {
    Object.assign(this, { names, overviews, comparison, charts: new Map() });
    this.axis = G.address.read().x || "steps";
    this.grid = G.h("div", { class: "grid" });
    this.chooser = G.h(
      "div",
      { class: "segmented", role: "group", "aria-label": "Horizontal axis" },
      ["steps", "tokens", "time"].map((axis) =>
        G.h(
          "button",
          {
            type: "button",
            "aria-pressed": axis === this.axis ? "true" : "false",
            onclick: () => this.over(axis),
          },
          "over " + axis,
        ),
      ),
    );
    this.summary = G.h("section", { class: "verdict", "aria-label": "Comparison" });
    this.tables = G.h("div", {});
    this.element = G.h("div", { class: "run" }, this.summary, this.chooser, this.grid, this.tables);
    this.draw();
  }

  over(axis) {
    this.axis = axis;
    for (const button of this.chooser.children)
      button.setAttribute("aria-pressed", button.textContent === "over " + axis ? "true" : "false");
    G.address.write({ x: axis });
    for (const chart of this.charts.values()) chart.remove();
    this.charts.clear();
    this.drawCharts();
  }

  update(overviews, comparison) {
    Object.assign(this, { overviews, comparison });
    this.draw();
  }

  draw() {
    const { comparison } = this;
    G.replace(
      this.summary,
      G.h("h1", {}, this.names.join(" · ")),
      comparison.sentences.map((s) => G.h("p", { class: "headline" }, G.joined(s))),
    );
    G.replace(this.tables, this.results(), this.differences());
    this.drawCharts();
  }

  // The position of each row of a run on the chosen axis: step, or tokens or seconds so far.
  positions(overview) {
    const { columns } = overview;
    if (this.axis === "steps") return columns.step;
    const name = this.axis === "tokens" ? "train/generated_tokens" : "timing_s/step";
    let sum = 0;
    return columns.step.map((_, i) => (sum += (columns[name] && columns[name][i]) || 0));
  }

  curve(spec, valuesOf) {
    const runs = this.overviews.map((o) => ({ x: this.positions(o), y: valuesOf(o.columns) }));
    const points = runs.map(({ x, y }) =>
      y ? x.map((v, i) => [v, y[i]]).filter(([, v]) => v !== null) : [],
    );
    if (!points.some((p) => p.length)) return null;
    const x = [...new Set(points.flatMap((p) => p.map(([v]) => v)))].sort((a, b) => a - b);
    const at = new Map(x.map((v, i) => [v, i]));
    const series = points.map((p, i) => {
      const values = new Array(x.length).fill(null);
      for (const [v, y] of p) values[at.get(v)] = y;
      return { label: this.names[i], values, color: "--p" + (i % 8), spanGaps: true, points: p.length <= 12 };
    });
    const xFormat = this.axis === "time" ? (v) => G.seconds(v) : G.number;
    return {
      ...spec,
      x,
      series,
      xLabel: { steps: "step", tokens: "generated tokens", time: "time" }[this.axis],
      xFormat,
    };
  }

  drawCharts() {
    const metric = (name) => (columns) => columns[name];
    const accuracy = (columns) => {
      const names = Object.keys(columns).filter(G.accuracySource);
      return (
        names.length &&
        columns.step.map((_, i) => {
          const values = names.map((n) => columns[n][i]).filter((v) => v !== null);
          return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
        })
      );
    };
    const specs = [
      this.curve({ id: "c-acc", title: "Held-out accuracy", yFormat: (v) => G.percent(v) }, accuracy),
      this.curve(
        { id: "c-reward", title: "Reward, all groups" },
        (c) => c["critic/score_all/mean"] || c["critic/score/mean"],
      ),
      this.curve(
        { id: "c-clip", title: "Clip fraction", yFormat: (v) => G.percent(v) },
        metric("actor/pg_clipfrac"),
      ),
      this.curve(
        { id: "c-kept", title: "Share of groups kept", yFormat: (v) => G.percent(v, 0) },
        metric("train/filtered_prompts_ratio"),
      ),
      this.curve({ id: "c-entropy", title: "Entropy" }, metric("actor/entropy")),
      this.curve({ id: "c-length", title: "Response length" }, metric("response_length/mean")),
      this.curve({ id: "c-grad", title: "Gradient norm" }, metric("actor/grad_norm")),
      this.curve({ id: "c-step", title: "Seconds per step" }, metric("timing_s/step")),
    ].filter(Boolean);
    specs.forEach((spec) => {
      if (this.charts.has(spec.id)) return this.charts.get(spec.id).update(spec);
      const chart = G.chart(spec);
      this.charts.set(spec.id, chart);
      this.grid.append(chart.element);
    });
  }

  results() {
    const { runs, differences } = this.comparison;
    const cell = (v) => G.h("td", {}, v);
    const span = (ci) => (ci ? ` (${(100 * ci[0]).toFixed(1)} to ${(100 * ci[1]).toFixed(1)})` : "");
    const head = [
      "run",
      "status",
      "steps",
      "start",
      "end (95 % interval)",
      `against ${this.names[0]}`,
      "generated tokens",
      "wasted",
      "time",
    ];
    const rows = runs.map((r, i) => {
      const d = differences.find((x) => x.b === r.name);
      return G.h(
        "tr",
        {},
        G.h("th", { scope: "row" }, this.key(i), r.name),
        cell(r.status),
        cell(G.number(r.steps)),
        cell(G.percent(r.start_acc)),
        cell(G.percent(r.final_acc) + span(r.final_ci)),
        cell(
          d && d.paired
            ? `${d.paired.difference >= 0 ? "+" : "−"}${Math.abs(100 * d.paired.difference).toFixed(1)} points (${(100 * d.paired.low).toFixed(1)} to ${(100 * d.paired.high).toFixed(1)}), ${d.paired.num_questions} questions`
            : "–",
        ),
        cell(G.number(r.generated_tokens)),
        cell(r.wasted_share === null ? "–" : G.percent(r.wasted_share, 0)),
        cell(G.seconds(r.seconds)),
      );
    });
    return this.table("results", "Results", head, rows);
  }

  key(i) {
    const dot = G.h("span", { class: "dot" });
    dot.style.background = G.css("--p" + (i % 8));
    return dot;
  }

  differences() {
    const { config } = this.comparison;
    const shown = (v) => (v === null ? "null" : typeof v === "string" ? v : JSON.stringify(v));
    if (!config.length)
      return G.h(
        "section",
        {},
        G.h("h2", {}, "Config differences"),
        G.h("p", { class: "empty" }, "None: the configs are the same."),
      );
    return this.table(
      "config-differences",
      "Config differences",
      ["key", ...this.names],
      config.map((c) =>
        G.h(
          "tr",
          {},
          G.h("th", { scope: "row" }, c.key),
          c.values.map((v) => G.h("td", { class: "code" }, v.missing ? "–" : shown(v.value))),
        ),
      ),
    );
  }

  table(id, title, head, rows) {
    return G.h(
      "section",
      { id },
      G.h("h2", {}, title),
      G.h(
        "div",
        { class: "scroll panel", tabindex: "0", role: "region", "aria-label": title },
        G.h(
          "table",
          {},
          G.h(
            "thead",
            {},
            G.h(
              "tr",
              {},
              head.map((t) => G.h("th", { scope: "col" }, t)),
            ),
          ),
          G.h("tbody", {}, rows),
        ),
      ),
    );
  }

  remove() {
    for (const chart of this.charts.values()) chart.remove();
    this.element.remove();
  }
};
