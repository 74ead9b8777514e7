"use strict";
// Which charts a run gets, and the numbers in them. A chart without data is left out.

G.panels = (function () {
  const clean = (text) => text.replaceAll("_", " ");

  function rows(columns, names) {
    const present = names.filter((name) => columns[name] && columns[name].some((v) => v !== null));
    const keep = columns.step
      .map((_, i) => i)
      .filter((i) => present.some((name) => columns[name][i] !== null));
    return { present, x: keep.map((i) => columns.step[i]), of: (name) => keep.map((i) => columns[name][i]) };
  }

  function lines(columns, spec, wanted) {
    const { present, x, of } = rows(
      columns,
      wanted.map(([name]) => name),
    );
    if (!present.length) return null;
    const series = wanted
      .filter(([name]) => present.includes(name))
      .map(([name, label, more]) => ({ label, values: of(name), metric: name, ...more }));
    return { ...spec, x, series };
  }

  function reward(columns) {
    const names = Object.keys(columns);
    // Where the answers are right or wrong, the accuracy has a chart of its own.
    const held = names.some(G.accuracySource) ? [] : names.filter((name) => /^val-core\/.+\/reward\/mean@\d+$/.test(name));
    return lines(
      columns,
      {
        id: "reward",
        title: "Reward",
        note:
          "Mean score of the responses of a step: of all groups, and of the groups that were trained on" +
          (held.length ? "; and of the held-out questions." : "."),
      },
      [
        ["critic/score_all/mean", "all groups", { color: "--p0" }],
        ["critic/score/mean", "trained groups", { color: "--p2", dash: [5, 4] }],
        ...held.map((name, i) => [
          name,
          held.length > 1 ? `held-out ${name.split("/").slice(1, -2).join("/")}` : "held-out",
          { color: "--p" + ((2 * i + 1) % 8), points: true, spanGaps: true },
        ]),
      ],
    );
  }

  // Each part of a reward that has several: the rule beside a judge or a model.
  function parts(columns) {
    const part = (name) => (name.match(/^reward\/reward\/(.+)\/mean$/) || [])[1];
    const names = Object.keys(columns).filter(part).sort();
    const spec = {
      id: "parts",
      title: "Parts of the reward",
      note: "Mean score of the groups that were trained on, by part, without its weight. A reward model has a scale of its own.",
    };
    const look = (i) => ({ color: "--p" + (i % 8), ...(i % 2 ? { dash: [5, 4] } : {}) });
    return lines(
      columns,
      spec,
      names.map((name, i) =>
        part(name) === "model" && names.length > 1
          ? [name, "model (right)", { ...look(i), right: true }]
          : [name, part(name), look(i)],
      ),
    );
  }

  function disagreement(columns) {
    const spec = {
      id: "disagreement",
      title: "Disagreement with the rule",
      note: "Share of responses, or of pairs in a group, that the rule sees otherwise than the judge or the reward model.",
    };
    return lines(columns, spec, [
      ["judge/disagreement", "judge", { color: "--p0" }],
      ["reward_model/disagreement", "reward model", { color: "--p2" }],
    ]);
  }

  function loss(columns) {
    return lines(
      columns,
      {
        id: "loss",
        title: "Loss",
        note: "Mean negative log-probability per answer token: of the examples of a step, and of the held-out examples.",
      },
      [
        ["train/loss", "training", { color: "--p0" }],
        ["val/loss", "held out", { color: "--p1", points: true, spanGaps: true }],
      ],
    );
  }

  function accuracy({ columns, seen }) {
    const names = Object.keys(columns).filter(G.accuracySource);
    const { present, x, of } = rows(columns, names);
    if (!present.length) return null;
    const series = [],
      bands = [];
    present.forEach((name, i) => {
      const source = G.accuracySource(name);
      const color = "--p" + (i % 8);
      series.push({
        label: present.length > 1 ? source : "accuracy",
        values: of(name),
        color,
        points: true,
        spanGaps: true,
        metric: name,
      });
      const [low, high] = ["ci_low", "ci_high"].map((end) => `val-aux/${source}/acc/${end}`);
      if (columns[low] && columns[high]) {
        series.push({
          label: present.length > 1 ? `${source} high` : "95 % high",
          values: of(high),
          color,
          width: 0,
          spanGaps: true,
        });
        series.push({
          label: present.length > 1 ? `${source} low` : "95 % low",
          values: of(low),
          color,
          width: 0,
          spanGaps: true,
        });
        bands.push({ series: [series.length - 1, series.length], color, alpha: 0.16 });
      }
    });
    return {
      id: "accuracy",
      title: "Held-out accuracy",
      note: (seen
        ? seen[0]
          ? `${seen[0]} of the ${seen[1]} questions are training rows too: not a measure of new questions.`
          : "Questions never trained on."
        : "Questions of the evaluation.") + " The band is the 95 % interval.",
      x,
      series,
      bands,
      yFormat: (v) => G.percent(v),
    };
  }

  function fates(columns) {
    const metric = (fate) => `train/groups_${fate}`;
    const { present, x, of } = rows(columns, Object.keys(G.fates).map(metric));
    const series = Object.entries(G.fates)
      .filter(([fate]) => present.includes(metric(fate)))
      .map(([fate, { label, color }]) => ({ label, color, values: of(metric(fate)), metric: metric(fate) }))
      .filter((s) => s.values.some((v) => v));
    if (!series.length) return null;
    return {
      id: "fates",
      title: "Groups by fate",
      note: "Groups judged in each step, kept or dropped; on top, those in progress or queued for the next step.",
      x,
      series,
      stack: true,
      ...bars(x),
    };
  }

  const bars = (x) =>
    x.length <= 150 ? { bars: true, xRange: (u, low, high) => [low - 0.6, high + 0.6] } : { bars: false };

  function tokens(columns) {
    const { present, x, of } = rows(columns, ["train/generated_tokens", "train/wasted_tokens"]);
    if (present.length < 2) return null;
    const wasted = of("train/wasted_tokens"),
      all = of("train/generated_tokens");
    return {
      id: "tokens",
      title: "Generated tokens",
      note: "Tokens of groups that were trained on, and of those that were not.",
      x,
      stack: true,
      ...bars(x),
      series: [
        {
          label: "trained on",
          color: "--c-kept",
          values: all.map((v, i) => (v === null ? null : v - (wasted[i] || 0))),
        },
        { label: "wasted", color: "--c-wrong", values: wasted, metric: "train/wasted_tokens" },
      ],
    };
  }

  function clipping(columns) {
    return lines(
      columns,
      {
        id: "clip",
        title: "Clip fraction by side",
        note: "Share of sequences (tokens, for token-level ratios) whose gradient was clipped to zero.",
        yFormat: (v) => G.percent(v, 1),
      },
      [
        ["actor/pg_clipfrac", "both", { color: "--p0" }],
        ["actor/pg_clipfrac_lower", "lower (A < 0)", { color: "--p3", dash: [5, 4] }],
        ["actor/pg_clipfrac_upper", "upper (A > 0)", { color: "--p2", dash: [2, 3] }],
      ],
    );
  }

  function clippingByBatch(columns) {
    const found = Object.keys(columns)
      .map((n) => [n, /^actor\/pg_clipfrac\/mb(\d+)$/.exec(n)])
      .filter(([, m]) => m)
      .sort((a, b) => a[1][1] - b[1][1]);
    const shown = found.length > 8 ? [...found.slice(0, 4), ...found.slice(-4)] : found;
    return lines(
      columns,
      {
        id: "clip-mb",
        title: "Clip fraction by mini-batch",
        note: "The first mini-batch of a step cannot clip: it is updated from the weights in the ratio's denominator.",
        yFormat: (v) => G.percent(v, 1),
      },
      shown.map(([name, match], i) => [name, `mini-batch ${+match[1] + 1}`, { color: "--p" + (i % 8) }]),
    );
  }

  function length(columns) {
    const spec = lines(
      columns,
      { id: "length", title: "Response length", note: "Tokens; the band spans shortest to longest." },
      [
        ["response_length/max", "max", { color: "--p4", width: 0.75 }],
        ["response_length/mean", "mean", { color: "--p4", width: 2 }],
        ["response_length/min", "min", { color: "--p4", width: 0.75 }],
      ],
    );
    if (spec && spec.series.length === 3) spec.bands = [{ series: [1, 3], color: "--p4", alpha: 0.12 }];
    return spec;
  }

  function timing(columns) {
    const names = Object.keys(columns).filter((n) => n.startsWith("timing_s/") && n !== "timing_s/step");
    const { present, x, of } = rows(columns, names);
    if (!present.length) return null;
    const sum = (name) => of(name).reduce((a, b) => a + (b || 0), 0);
    const ordered = present.filter((n) => sum(n) > 0).sort((a, b) => sum(b) - sum(a));
    const shown = ordered.slice(0, 7);
    const series = shown.map((name, i) => ({
      label: clean(name.slice(9)),
      values: of(name),
      color: "--p" + i,
      metric: name,
    }));
    if (columns["timing_s/step"]) {
      const rest = of("timing_s/step").map((v, i) =>
        v === null ? null : Math.max(0, v - series.reduce((a, s) => a + (s.values[i] || 0), 0)),
      );
      if (rest.some((v) => v > 0)) series.push({ label: "other", values: rest, color: "--c-skipped" });
    }
    return {
      id: "timing",
      title: "Time by stage",
      note: "Seconds of each step.",
      x,
      series,
      stack: true,
      ...bars(x),
      yFormat: (v) => G.number(v, 3),
    };
  }

  const single = (columns, id, title, note, name, color, more) =>
    lines(columns, { id, title, note, ...more }, [
      [name, name.split("/").slice(1).join(" ").replaceAll("_", " "), { color }],
    ]);

  function speed(columns) {
    const names = Object.keys(columns).filter((n) => n.startsWith("perf/") && /per_s|throughput/.test(n));
    return lines(
      columns,
      { id: "speed", title: "Throughput", note: "Tokens per second." },
      names.slice(0, 4).map((n, i) => [n, clean(n.slice(5)), { color: "--p" + i }]),
    );
  }

  function sections(overview, index) {
    const c = overview.columns;
    return [
      {
        id: "learning",
        title: "Learning",
        charts: [accuracy(overview), loss(c), reward(c), parts(c), disagreement(c), G.groupPanels.difficulty(index), length(c)],
      },
      { id: "sampling", title: "Sampling", charts: [fates(c), tokens(c)] },
      {
        id: "stability",
        title: "Stability",
        charts: [
          ...G.groupPanels.ratios(overview, index),
          clipping(c),
          clippingByBatch(c),
          single(
            c,
            "entropy",
            "Entropy",
            "Token mean, in nats. A fall to zero means the policy stopped exploring.",
            "actor/entropy",
            "--p5",
          ),
          single(
            c,
            "grad",
            "Gradient norm",
            "Before clipping, mean over the step's mini-batches.",
            "actor/grad_norm",
            "--p6",
          ),
          single(c, "kl", "KL to the old policy", "Estimated on the trained tokens.", "actor/ppo_kl", "--p3"),
        ],
      },
      { id: "speed", title: "Time", charts: [timing(c), speed(c)] },
    ].map((s) => ({ ...s, charts: s.charts.filter(Boolean) }));
  }

  return { sections, lines, rows };
})();
