"use strict";
// Charts that need every group, not only the metrics: prompt difficulty and the distribution of the ratio.

G.groupPanels = (function () {
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
      note: "Each cell: share of a step's prompts with that success rate. As the model learns, prompts move upwards; groups at 0 % and 100 % give no gradient.",
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
      note: `All ${total.toLocaleString("en")} trained responses; ${G.percent(out / total)} are outside their step's band${all[0] < low || all.at(-1) > high ? ", the outermost bars include all values beyond them" : ""}. The clip acts only where the advantage pushes further out.`,
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

  return { difficulty, ratios };
})();
