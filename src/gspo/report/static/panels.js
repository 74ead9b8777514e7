"use strict";
// Which charts a run gets, and the numbers in them. A chart without data is left out.

G.panels = (function () {
  const FATES = [
    "kept",
    "same_score",
    "all_right",
    "all_wrong",
    "stale_dropped",
    "surplus",
    "reward_failed",
    "skipped",
    "carried",
  ];
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
    return lines(
      columns,
      {
        id: "reward",
        title: "Reward",
        note: "Mean score of a step's responses, before and after groups that teach nothing are dropped.",
      },
      [
        ["critic/score_all/mean", "all groups", { color: "--p0" }],
        ["critic/score/mean", "trained groups", { color: "--p2", dash: [5, 4] }],
      ],
    );
  }

  function accuracy(columns) {
    const names = Object.keys(columns).filter((n) => n.startsWith("val-core/") && n.includes("/acc/mean@"));
    const { present, x, of } = rows(columns, names);
    if (!present.length) return null;
    const series = [],
      bands = [];
    present.forEach((name, i) => {
      const source = name.split("/").slice(1, -2).join("/");
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
      note: "Questions never trained on, with the 95 % interval.",
      x,
      series,
      bands,
      yFormat: (v) => G.percent(v),
    };
  }

  function difficulty(index) {
    const entries = index.filter((e) => e.kind === "train" && e.groups.some((g) => g.rate !== null));
    if (!entries.length) return null;
    const sizes = new Set(entries.flatMap((e) => e.groups.map((g) => g.n)));
    const levels = sizes.size === 1 && [...sizes][0] <= 16 ? [...sizes][0] : 10;
    const width = Math.ceil(entries.length / 120);
    const columns = [];
    for (let i = 0; i < entries.length; i += width) {
      const slice = entries.slice(i, i + width);
      const counts = new Array(levels + 1).fill(0);
      let sum = 0,
        total = 0;
      for (const entry of slice) {
        for (const group of entry.groups) {
          if (group.rate === null) continue;
          counts[Math.round(Math.max(0, Math.min(1, group.rate)) * levels)]++;
          sum += group.rate;
          total++;
        }
      }
      columns.push({
        from: slice[0].step,
        to: slice.at(-1).step,
        counts,
        mean: total ? sum / total : null,
        total,
      });
    }
    const spec = {
      id: "difficulty",
      title: "Prompt difficulty over time",
      note: "Each cell: share of a step's prompts answered right that often. Learning moves the mass upwards; groups at 0 % and 100 % teach nothing.",
      x: columns.map((c) => (c.from + c.to) / 2),
      series: [{ label: "mean success rate", values: columns.map((c) => c.mean), color: "--p1", width: 2 }],
      yFormat: (v) => G.percent(v, 0),
      yRange: () => [-0.5 / levels, 1 + 0.5 / levels],
      columns,
      levels,
      ySize: 50,
      xRange: (u, low, high) => [low - 0.5 * width, high + 0.5 * width],
      legend: G.h("div", { class: "ramp" }, "0 %", G.h("span", {}), "100 % of the step's prompts"),
    };
    spec.under = (u) => {
      const color = G.css("--heat");
      for (const column of spec.columns) {
        const left = Math.round(u.valToPos(column.from - 0.5, "x", true)),
          right = Math.round(u.valToPos(column.to + 0.5, "x", true));
        column.counts.forEach((count, level) => {
          if (!count) return;
          const top = Math.round(u.valToPos((level + 0.5) / spec.levels, "y", true)),
            bottom = Math.round(u.valToPos((level - 0.5) / spec.levels, "y", true));
          u.ctx.fillStyle = G.alpha(color, 0.06 + 0.94 * Math.sqrt(count / column.total));
          u.ctx.fillRect(left, top, Math.max(1, right - left - (right - left > 6 ? 1 : 0)), bottom - top - 1);
        });
      }
    };
    return spec;
  }

  function fates(columns) {
    const { present, x, of } = rows(
      columns,
      FATES.map((f) => `train/groups_${f}`),
    );
    const names = FATES.filter((f) => present.includes(`train/groups_${f}`));
    const series = names
      .map((f) => ({
        label: G.fate(f).label,
        color: G.fate(f).color,
        values: of(`train/groups_${f}`),
        metric: `train/groups_${f}`,
      }))
      .filter((s) => s.values.some((v) => v));
    if (!series.length) return null;
    return {
      id: "fates",
      title: "Groups by fate",
      note: "What became of the groups judged in each step; on top, those left in flight or queued for the next.",
      x,
      series,
      stack: true,
      bars: x.length <= 150,
      xRange: x.length <= 150 ? halfStep : undefined,
    };
  }

  const halfStep = (u, low, high) => [low - 0.6, high + 0.6];

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
      bars: x.length <= 150,
      xRange: x.length <= 150 ? halfStep : undefined,
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
        note: "Share of sequences (tokens, for token ratios) whose gradient the clip removed.",
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
        note: "The first mini-batch of a step cannot clip: its weights are those that the ratio is taken against.",
        yFormat: (v) => G.percent(v, 1),
      },
      shown.map(([name, match], i) => [name, `mini-batch ${+match[1] + 1}`, { color: "--p" + (i % 8) }]),
    );
  }

  function quantile(sorted, q) {
    const at = q * (sorted.length - 1),
      low = Math.floor(at);
    return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
  }

  function bandAt(overview) {
    const { columns, clip } = overview;
    const at = new Map(columns.step.map((s, i) => [s, i]));
    const side = (name, fallback) => (step) =>
      (columns[name] && at.has(step) ? columns[name][at.get(step)] : null) ?? fallback ?? null;
    return { low: side("actor/clip_ratio_low", clip.low), high: side("actor/clip_ratio_high", clip.high) };
  }

  function ratios(overview, index) {
    const entries = index.filter((e) => e.ratios && e.ratios.length);
    if (!entries.length) return [];
    const band = bandAt(overview);
    const x = entries.map((e) => e.step);
    const sorted = entries.map((e) => Float64Array.from(e.ratios).sort());
    const level = (q) => sorted.map((values) => quantile(values, q));
    const series = [
      { label: "99 %", values: level(0.99), color: "--p0", width: 0.5 },
      { label: "75 %", values: level(0.75), color: "--p0", width: 0.5 },
      { label: "median", values: level(0.5), color: "--p0", width: 2 },
      { label: "25 %", values: level(0.25), color: "--p0", width: 0.5 },
      { label: "1 %", values: level(0.01), color: "--p0", width: 0.5 },
    ];
    const lows = x.map((s) => band.low(s)),
      highs = x.map((s) => band.high(s));
    if (highs.some((v) => v !== null))
      series.push({ label: "clip high", values: highs, color: "--bad", dash: [6, 4], width: 1.5 });
    if (lows.some((v) => v !== null))
      series.push({
        label: "clip low",
        values: lows.map((v) => (v === null ? null : -v)),
        color: "--bad",
        dash: [6, 4],
        width: 1.5,
      });
    const fan = {
      id: "ratio",
      title: "Sequence ratio against the clip band",
      x,
      series,
      note: "Ratio − 1 of trained responses, new policy over old, at their own mini-batch. Dashed: the clip band.",
      bands: [
        { series: [1, 5], color: "--p0", alpha: 0.13 },
        { series: [2, 4], color: "--p0", alpha: 0.25 },
      ],
      ySize: 66,
    };
    const width = Math.max(...highs.map((v) => v || 0), ...lows.map((v) => v || 0));
    const reach = Math.max(...series.slice(0, 5).flatMap((s) => s.values.map(Math.abs)));
    if (width > 0 && reach > 5 * width) {
      // far tails would flatten the band to a line: linear up to the band, logarithmic beyond
      fan.asinh = width;
      fan.note += " The scale is logarithmic beyond it.";
    }
    return [fan, histogram(entries, sorted, lows, highs)];
  }

  function histogram(entries, sorted, lows, highs) {
    const all = Float64Array.from(entries.flatMap((e) => e.ratios)).sort();
    const edge = (q, eps) =>
      eps ? Math.min(6 * eps, Math.max(Math.abs(quantile(all, q)), 1.5 * eps)) : Math.abs(quantile(all, q));
    const low = -edge(0.002, Math.max(...lows)),
      high = edge(0.998, Math.max(...highs));
    const bins = 48,
      width = (high - low) / bins || 1e-9;
    const inside = new Array(bins).fill(0),
      outside = new Array(bins).fill(0);
    entries.forEach((entry, i) => {
      for (const r of entry.ratios) {
        const bin = Math.max(0, Math.min(bins - 1, Math.floor((r - low) / width)));
        const out = (highs[i] !== null && r > highs[i]) || (lows[i] !== null && r < -lows[i]);
        (out ? outside : inside)[bin]++;
      }
    });
    const total = all.length,
      out = outside.reduce((a, b) => a + b, 0);
    return {
      id: "ratio-hist",
      title: "Distribution of the sequence ratio",
      x: inside.map((_, i) => low + (i + 0.5) * width),
      xLabel: "ratio − 1",
      note: `All ${total.toLocaleString("en")} trained responses; ${G.percent(out / total)} lay outside their step's band${all[0] < low || all.at(-1) > high ? ", the outermost bars hold all beyond them" : ""}. The clip acts only where the advantage pushes further out.`,
      series: [
        { label: "inside the band", values: inside, color: "--p0" },
        { label: "outside", values: outside, color: "--bad" },
      ],
      stack: true,
      bars: true,
      barSize: 1,
      noLatest: true,
      xFormat: (v) => G.number(v, 3),
      xRange: () => [low - width / 2, high + width / 2],
    };
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
      bars: x.length <= 150,
      xRange: x.length <= 150 ? halfStep : undefined,
      yFormat: (v) => G.number(v, 3),
    };
  }

  const single = (columns, id, title, note, name, color, more) =>
    lines(columns, { id, title, note, ...more }, [
      [name, name.split("/").slice(1).join(" ").replaceAll("_", " "), { color }],
    ]);

  function speed(columns) {
    const names = Object.keys(columns).filter((n) => n.startsWith("perf/") && n.includes("per_s"));
    return lines(
      columns,
      { id: "speed", title: "Throughput", note: "Tokens a second." },
      names.slice(0, 4).map((n, i) => [n, clean(n.slice(5)), { color: "--p" + i }]),
    );
  }

  function sections(overview, index) {
    const c = overview.columns;
    return [
      { id: "learning", title: "Learning", charts: [accuracy(c), reward(c), difficulty(index), length(c)] },
      { id: "sampling", title: "Sampling", charts: [fates(c), tokens(c)] },
      {
        id: "stability",
        title: "Stability",
        charts: [
          ...ratios(overview, index),
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
