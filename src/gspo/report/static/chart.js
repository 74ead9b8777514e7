"use strict";
// Charts: uPlot with our colours, a keyboard cursor, a spoken summary and the numbers as a table.

G.chart = (function () {
  const charts = new Set();
  const HEIGHT = 230;
  const WHOLE = [1, 2, 5].flatMap((m) => [...Array(7).keys()].map((e) => m * 10 ** e)).sort((a, b) => a - b);
  const visible = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) if (entry.isIntersecting) entry.target.chart.show();
    },
    { rootMargin: "200px" },
  );
  const sized = new ResizeObserver((entries) => {
    for (const entry of entries) entry.target.chart.resize();
  });
  G.theme.listeners.add(() => {
    for (const chart of charts) chart.rebuild();
  });

  function axes(spec) {
    const base = {
      stroke: G.css("--muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: G.css("--grid"), width: 1 },
      ticks: { stroke: G.css("--grid"), width: 1, size: 4 },
    };
    const format = spec.yFormat || G.number;
    return [
      {
        ...base,
        size: 30,
        space: 60,
        incrs: spec.xLabel ? undefined : WHOLE,
        values: (u, ticks) => ticks.map((v) => (spec.xFormat || G.number)(v)),
      },
      {
        ...base,
        size: spec.ySize || 58,
        space: 28,
        values: (u, ticks) => ticks.map((v) => (v === null ? "" : format(v))),
      },
      ...(spec.series.some((s) => s.right)
        ? [{ ...base, scale: "right", side: 1, size: 46, space: 28, grid: { show: false } }]
        : []),
    ];
  }

  function stacked(spec) {
    const sum = new Float64Array(spec.x.length);
    return spec.series.map((series) => series.values.map((value, i) => (sum[i] += value || 0)));
  }

  function options(spec, width) {
    const palette = G.palette();
    const format = spec.yFormat || G.number;
    const shown = spec.stack ? [...spec.series].reverse() : spec.series;
    const series = shown.map((s, i) => {
      const color = s.color ? G.css(s.color) : palette[i % palette.length];
      const few = spec.x.length <= 60;
      return {
        label: s.label,
        scale: s.right ? "right" : "y", // numbers of another scale than the other curves
        stroke: spec.stack ? G.css("--panel") : color,
        width: spec.stack ? 0.75 : (s.width ?? 1.75),
        dash: s.dash,
        spanGaps: s.spanGaps ?? false,
        fill: spec.stack ? color : s.fill ? G.alpha(color, s.fill) : undefined,
        paths: s.bars || spec.bars ? uPlot.paths.bars({ size: [spec.barSize || 0.9, 100] }) : undefined,
        points: s.points
          ? { show: true, size: 6, fill: color, stroke: color }
          : { show: few && !spec.stack && !spec.bars && s.width !== 0 ? undefined : false, size: 4 },
        value: (u, v, seriesIndex, i) => {
          const raw = i === null || i === undefined ? latest(s.values, spec) : s.values[i];
          return raw === null || raw === undefined ? "–" : (s.format || format)(raw);
        },
        swatch: s.width < 1 ? G.alpha(color, 0.45) : color,
      };
    });
    return {
      width,
      height: HEIGHT,
      padding: [12, 12, 0, 0],
      scales: {
        x: { time: false, range: spec.xRange },
        y: {
          range: spec.yRange || (spec.asinh ? undefined : spec.stack ? fromZero : nice),
          ...(spec.asinh ? { distr: 4, asinh: spec.asinh } : {}),
        },
        ...(spec.series.some((s) => s.right) ? { right: { range: nice } } : {}),
      },
      series: [
        {
          label: spec.xLabel || "step",
          value: (u, v) => ((v = v ?? latest(spec.x, spec)) === null ? "–" : (spec.xFormat || G.number)(v)),
        },
        ...series,
      ],
      bands: spec.bands && spec.bands.map((b) => ({ ...b, fill: G.alpha(G.css(b.color), b.alpha) })),
      axes: axes(spec),
      legend: {
        live: true,
        markers: { width: 0, fill: (u, i) => (i ? series[i - 1].swatch : "transparent") },
      },
      cursor: { points: { size: 7 }, drag: { x: true, y: false }, focus: { prox: 24 } },
      hooks: { drawAxes: [(u) => spec.under && spec.under(u)] },
    };
  }

  // While the cursor is elsewhere, the legend shows the last value of each curve.
  function latest(values, spec) {
    if (spec.noLatest) return null;
    for (let i = values.length - 1; i >= 0; i--)
      if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  }

  function fromZero(u, low, high) {
    return [0, high > 0 ? high * 1.06 : 1];
  }

  function nice(u, low, high) {
    if (low === null) return [0, 1];
    if (low === high) {
      const pad = Math.abs(low) * 0.1 || 1;
      return [low - pad, high + pad];
    }
    return uPlot.rangeNum(low, high, 0.08, true);
  }

  // Exponential mean of a curve; gaps stay gaps. Points, bands, bars and stacks stay as measured.
  function smoothed(series, spec) {
    const weight = G.smoothing || 0;
    if (!weight || spec.bars || series.bars || series.points || series.width === 0 || spec.under) return series.values;
    let mean = null;
    return series.values.map((v) => {
      if (v === null || v === undefined) return v;
      mean = mean === null ? v : weight * mean + (1 - weight) * v;
      return mean;
    });
  }

  function data(spec) {
    if (!spec.stack) return [spec.x, ...spec.series.map((s) => smoothed(s, spec))];
    return [spec.x, ...stacked(spec).reverse()];
  }

  class Chart {
    constructor(spec) {
      this.spec = spec;
      this.plot = null;
      this.box = G.h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": this.summary() });
      this.box.chart = this;
      this.table = G.h("details", { class: "numbers" }, G.h("summary", {}, "Numbers"));
      this.table.addEventListener("toggle", () => this.fillTable());
      this.readout = G.h("p", { class: "sr", "aria-live": "polite" });
      this.element = G.h(
        "figure",
        { class: "panel chart" + (spec.wide ? " wide" : ""), id: "chart-" + spec.id },
        G.h("figcaption", {}, G.h("h3", {}, spec.title), spec.note && G.h("p", { class: "note" }, spec.note)),
        this.box,
        spec.legend,
        this.readout,
        this.table,
      );
      this.box.addEventListener("keydown", (event) => this.key(event));
      charts.add(this);
      visible.observe(this.box);
    }
    summary() {
      const { spec } = this;
      const parts = spec.series.slice(0, 6).map((s) => {
        const numbers = s.values.filter((v) => v !== null && v !== undefined);
        const format = s.format || spec.yFormat || G.number;
        return numbers.length
          ? `${s.label} from ${format(numbers[0])} to ${format(numbers.at(-1))}`
          : `${s.label} without values`;
      });
      return `${spec.title}: ${spec.describe || parts.join("; ")}. Arrow keys read the values.`;
    }
    show() {
      visible.unobserve(this.box);
      if (!this.plot) this.build();
      sized.observe(this.box);
    }
    build() {
      this.box.replaceChildren();
      this.plot = new uPlot(options(this.spec, this.box.clientWidth || 400), data(this.spec), this.box);
      this.plot.over.addEventListener("pointerup", () => setTimeout(() => this.markZoom()));
      this.plot.over.addEventListener("dblclick", () => setTimeout(() => this.markZoom()));
    }
    // Drag across a chart to enlarge a part of it, double-click to see all again.
    markZoom() {
      const { min, max } = this.plot.scales.x;
      const [first, last] = [this.spec.x[0], this.spec.x.at(-1)];
      this.zoomed = max - min < 0.98 * (last - first);
      this.box.classList.toggle("zoomed", this.zoomed);
    }
    rebuild() {
      if (!this.plot) return;
      this.plot.destroy();
      this.build();
    }
    resize() {
      const width = this.box.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
    }
    update(spec) {
      const names = (s) => s.series.map((x) => x.label).join("\n");
      const same = names(spec) === names(this.spec);
      if (same) spec.series.forEach((series, i) => Object.assign(this.spec.series[i], series));
      Object.assign(this.spec, spec, { series: same ? this.spec.series : spec.series });
      this.box.setAttribute("aria-label", this.summary());
      this.fillTable();
      if (!this.plot) return;
      if (same) this.redraw();
      else this.rebuild();
    }
    // New values, at the zoom that the reader chose.
    redraw() {
      if (!this.plot) return;
      const { min, max } = this.plot.scales.x;
      this.plot.setData(data(this.spec), !this.zoomed);
      if (this.zoomed) this.plot.setScale("x", { min, max });
    }
    key(event) {
      const move = {
        ArrowLeft: -1,
        ArrowRight: 1,
        PageUp: -10,
        PageDown: 10,
        Home: -Infinity,
        End: Infinity,
      }[event.key];
      if (move === undefined || !this.plot) return;
      event.preventDefault();
      const last = this.spec.x.length - 1;
      const at = Math.max(0, Math.min(last, (this.at ?? (move > 0 ? -1 : last + 1)) + move));
      this.at = at;
      this.plot.setCursor({ left: this.plot.valToPos(this.spec.x[at], "x"), top: 20 });
      const format = this.spec.yFormat || G.number;
      this.readout.textContent =
        `${this.spec.xLabel || "step"} ${(this.spec.xFormat || G.number)(this.spec.x[at])}: ` +
        this.spec.series
          .map((s) => `${s.label} ${s.values[at] == null ? "none" : (s.format || format)(s.values[at])}`)
          .join(", ");
    }
    fillTable() {
      if (!this.table.open) return;
      const { x, series, xLabel } = this.spec;
      const every = Math.max(1, Math.ceil(x.length / 200));
      const rows = x.map((_, i) => i).filter((i) => i % every === 0 || i === x.length - 1);
      const head = G.h(
        "tr",
        {},
        G.h("th", { scope: "col" }, xLabel || "step"),
        series.map((s) => G.h("th", { scope: "col" }, s.label)),
      );
      const body = rows.map((i) =>
        G.h(
          "tr",
          {},
          G.h("th", { scope: "row" }, G.number(x[i])),
          series.map((s) => G.h("td", {}, s.values[i] == null ? "–" : String(s.values[i]))),
        ),
      );
      const old = this.table.querySelector(".scroll");
      if (old) old.remove();
      this.table.append(
        G.h(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": this.spec.title + ", numbers" },
          every > 1 &&
            G.h("p", { class: "note" }, `Every ${every}th of ${x.length} rows; metrics.jsonl has them all.`),
          G.h("table", {}, G.h("thead", {}, head), G.h("tbody", {}, body)),
        ),
      );
    }
    remove() {
      charts.delete(this);
      visible.unobserve(this.box);
      sized.unobserve(this.box);
      if (this.plot) this.plot.destroy();
      this.element.remove();
    }
  }

  const make = (spec) => new Chart(spec);
  make.all = charts;
  return make;
})();
