"use strict";
// One run: verdict, figures, charts, rollouts, config. Drawn once, then updated while the run continues.

G.decodeIndex = function (entries) {
  const fields = ["uid", "fate", "source", "n", "rate", "score", "tokens", "question", "truth", "version"];
  for (const entry of entries) {
    entry.groups = entry.groups.map((line) => Object.fromEntries(fields.map((f, i) => [f, line[i]])));
  }
  return entries;
};

G.RunView = class {
  constructor(source, name) {
    Object.assign(this, { source, name, charts: new Map(), index: [], generation: 0, closed: false });
    this.head = G.h("section", { class: "verdict", "aria-label": "Verdict" });
    this.tiles = G.h("div", { class: "tiles" });
    this.samples = G.h("div", {});
    this.alarms = G.h("div", {});
    this.body = G.h("div", {});
    this.rollouts = new G.Rollouts(source, name);
    this.metric = G.h("div", {});
    this.config = G.h("div", {});
    this.environment = G.h("div", {});
    const names = [
      ["learning", "Learning"],
      ["sampling", "Sampling"],
      ["stability", "Stability"],
      ["speed", "Time"],
      ["rollouts", "Rollouts"],
      ["metrics", "Any metric"],
      ["config", "Config"],
      ["environment", "Environment"],
    ];
    this.nav = G.h(
      "nav",
      { class: "sections", "aria-label": "Sections" },
      names.map(([id, title]) =>
        G.h(
          "a",
          {
            href: G.address.link({ ...this.home(), section: id }),
            onclick: (e) => {
              e.preventDefault();
              this.jump(id, true);
            },
          },
          title,
        ),
      ),
    );
    this.element = G.h(
      "div",
      { class: "run" },
      this.head,
      this.tiles,
      this.samples,
      this.alarms,
      this.nav,
      this.smoother(),
      this.body,
      this.section("rollouts", "Rollouts", this.rollouts.element),
      this.section("metrics", "Any metric", this.metric),
      this.section("config", "Config", this.config),
      this.section("environment", "Environment", this.environment),
    );
  }

  smoother() {
    const input = G.h("input", {
      type: "range",
      min: "0",
      max: "0.95",
      step: "0.05",
      "aria-label": "Smoothing of curves",
      oninput: () => {
        G.smoothing = +input.value;
        for (const chart of G.chart.all) chart.redraw();
      },
    });
    input.value = String(G.smoothing || 0);
    return G.h(
      "div",
      { class: "filters smoothing" },
      G.h("label", { class: "check" }, "Smoothing ", input),
      G.h("span", { class: "note" }, "Drag across a chart to enlarge a part; double-click shows all again."),
    );
  }

  drawSamples() {
    const { samples } = this.overview;
    if (!samples || !samples.length) return G.replace(this.samples);
    const mark = (value) => (value === 1 ? "right" : value === 0 ? "wrong" : `reward ${G.number(value, 3)}`);
    const answer = (title, text, value) =>
      G.h(
        "div",
        { class: "answer" },
        G.h("span", { class: "k" }, `${title}: ${mark(value)}`),
        G.h("div", { class: "text" }, text || "(empty)"),
      );
    G.replace(
      this.samples,
      G.h(
        "section",
        { class: "samples", "aria-label": "Answers before and after training" },
        G.h("h2", {}, "Before and after"),
        samples.map((s) =>
          G.h(
            "article",
            { class: "panel sample" },
            G.h("div", { class: "text q" }, s.question, s.truth && G.h("span", { class: "note" }, `  (${s.truth})`)),
            G.h("div", { class: "pair" }, answer("before", s.before, s.scores[0]), answer("after", s.after, s.scores[1])),
          ),
        ),
      ),
    );
  }

  home() {
    return this.source.live ? { run: this.name } : {};
  }

  section(id, title, ...content) {
    return G.h(
      "section",
      { id, tabindex: "-1", "aria-labelledby": `${id}-title` },
      G.h("h2", { id: `${id}-title` }, title),
      content,
    );
  }

  jump(id, write) {
    const target = document.getElementById(id);
    if (!target) return;
    if (write) G.address.write({ section: id });
    target.scrollIntoView({ block: "start" });
    target.focus({ preventScroll: true });
  }

  // Resolves when the verdict and the charts of the metrics are drawn; the groups follow in `indexed`.
  async start() {
    this.update(await this.source.overview(this.name));
    const address = G.address.read();
    if (address.section) this.jump(address.section, false);
    this.indexed = this.readIndex().then(() => {
      const now = G.address.read();
      if (this.rollouts.follow(now) && now.group) this.jump("rollouts", false);
      else if (now.section) this.jump(now.section, false);
      document.documentElement.dataset.indexed = "yes";
    });
  }

  // The dashboard's server may still be reading files: ask again until it has read all.
  readIndex() {
    this.reading ||= this.readParts().finally(() => (this.reading = null));
    return this.reading;
  }

  async readParts() {
    for (;;) {
      const known = this.index.length ? { count: this.index.length, generation: this.generation } : null;
      const answer = await this.source.index(this.name, known);
      if (this.closed) return;
      const reset = answer.generation !== this.generation;
      const entries = G.decodeIndex(answer.entries);
      this.index = reset ? entries : this.index.concat(entries);
      this.generation = answer.generation;
      if (entries.length || reset || !this.rollouts.groups.length) {
        this.rollouts.add(entries, answer.generation, reset);
        this.rollouts.listed(answer);
        this.drawCharts();
      }
      if (answer.complete) return;
      await new Promise((go) => setTimeout(go, 30));
    }
  }

  update(overview) {
    this.overview = overview;
    const { verdict } = overview;
    this.head.className = `verdict tone-${verdict.tone}`;
    G.replace(
      this.head,
      G.h("div", { class: "line" }, G.h("h1", {}, overview.name), G.badge(overview.status), this.progress()),
      G.h("p", { class: "headline" }, G.joined(verdict.headline)),
      verdict.sentences.map((s) => G.h("p", {}, G.joined(s))),
      G.problems(overview.problems),
      overview.thinned > 1 &&
        G.h(
          "p",
          { class: "note" },
          `Charts of these ${overview.num_rows.toLocaleString("en")} rows are thinned: of every ` +
            `${overview.thinned} rows they show the smallest, the largest and the last value.`,
        ),
    );
    G.replace(
      this.tiles,
      overview.tiles.map((t) =>
        G.h(
          "div",
          { class: "tile" },
          G.h("div", { class: "label" }, t.label),
          G.h("div", { class: "value" }, t.value),
          G.h("div", { class: "note" }, G.joined(t.detail)),
        ),
      ),
    );
    this.drawSamples();
    this.drawAlarms();
    this.drawCharts();
    this.drawMetric();
    if (!this.drawn) {
      this.drawn = true;
      this.drawConfig();
      this.drawEnvironment();
    }
  }

  progress() {
    const { last_step: at, total_steps: total, status } = this.overview;
    if (status !== "running" || !total) return null;
    const bar = G.h(
      "span",
      {
        class: "progress",
        role: "progressbar",
        "aria-valuemin": 0,
        "aria-valuemax": total,
        "aria-valuenow": at,
        "aria-label": "Training steps",
      },
      G.h("span", {}),
    );
    bar.firstChild.style.width = Math.min(100, (100 * at) / total) + "%";
    return [bar, G.h("span", { class: "note" }, `step ${at} of ${total}`)];
  }

  drawAlarms() {
    const { alarms } = this.overview;
    if (!alarms.length) return G.replace(this.alarms);
    const shown = alarms.slice(-50).reverse();
    G.replace(
      this.alarms,
      G.h(
        "details",
        { class: "alarms", open: alarms.length <= 5 },
        G.h("summary", {}, alarms.length === 1 ? "1 alarm" : `${alarms.length} alarms`),
        G.h(
          "ul",
          {},
          shown.map((a) =>
            G.h(
              "li",
              {},
              G.h("strong", {}, `step ${a.step ?? "?"}`),
              a.name ? ` ${a.name.replaceAll("_", " ")}: ` : ": ",
              a.text,
              a.action && a.action !== "warn" ? ` (${a.action})` : "",
            ),
          ),
        ),
        alarms.length > 50 && G.h("p", { class: "note" }, "The latest 50; alarms.jsonl has them all."),
      ),
    );
  }

  drawCharts() {
    for (const section of G.panels.sections(this.overview, this.index)) {
      let holder =
        document.getElementById(`grid-${section.id}`) || this.body.querySelector(`#grid-${section.id}`);
      if (!holder) {
        holder = G.h("div", { class: "grid", id: `grid-${section.id}` });
        this.body.append(this.section(section.id, section.title, holder));
      }
      if (!section.charts.length && !holder.children.length)
        holder.append(G.h("p", { class: "empty" }, "No data yet."));
      section.charts.forEach((spec, place) => {
        if (this.charts.has(spec.id)) return this.charts.get(spec.id).update(spec);
        const chart = G.chart(spec);
        this.charts.set(spec.id, chart);
        const empty = holder.querySelector(":scope > .empty");
        if (empty) empty.remove();
        holder.insertBefore(chart.element, holder.children[place] || null);
      });
    }
  }

  drawMetric() {
    const names = Object.keys(this.overview.columns)
      .filter((n) => n !== "step")
      .sort();
    if (!names.length) return;
    if (!this.chosen) {
      this.chosen = G.address.read().metric || "actor/lr";
      if (!names.includes(this.chosen)) this.chosen = names[0];
      this.picker = G.h("select", {
        onchange: () => {
          this.chosen = this.picker.value;
          G.address.write({ metric: this.chosen });
          this.drawMetric();
        },
      });
      this.pickerPlace = G.h("div", { class: "grid one" });
      G.replace(
        this.metric,
        G.h(
          "label",
          { class: "field wide" },
          G.h("span", {}, "Metric, by its name in metrics.jsonl"),
          this.picker,
        ),
        this.pickerPlace,
      );
    }
    if (this.picker.options.length !== names.length)
      G.replace(
        this.picker,
        names.map((n) => G.h("option", { value: n }, n)),
      );
    this.picker.value = this.chosen;
    const spec = G.panels.lines(this.overview.columns, { id: "any", title: this.chosen }, [
      [this.chosen, this.chosen, { spanGaps: true }],
    ]);
    if (!spec) return;
    if (this.any && this.any.spec.title === spec.title) return this.any.update(spec);
    if (this.any) this.any.remove();
    this.any = G.chart(spec);
    this.pickerPlace.append(this.any.element);
  }

  drawConfig() {
    const { config } = this.overview;
    if (!config.length)
      return G.replace(this.config, G.h("p", { class: "empty" }, "No config.yaml in the run folder."));
    const only = G.h("input", { type: "checkbox", checked: true });
    const query = G.h("input", {
      type: "search",
      placeholder: "key or value",
      "aria-label": "Search the config",
    });
    const body = G.h("tbody", {});
    const shown = (v) => (typeof v === "string" ? v : JSON.stringify(v));
    const draw = () => {
      const words = query.value.trim().toLowerCase();
      const rows = config.filter(
        (c) =>
          (!only.checked || (c.origin && c.origin !== "default")) &&
          (!words || `${c.key} ${shown(c.value)} ${c.origin}`.toLowerCase().includes(words)),
      );
      G.replace(
        body,
        rows.length
          ? rows.map((c) =>
              G.h(
                "tr",
                {},
                G.h("th", { scope: "row" }, c.key),
                G.h("td", { class: "code" }, shown(c.value)),
                G.h("td", {}, c.origin || "–"),
              ),
            )
          : G.h("tr", {}, G.h("td", { colspan: 3 }, "No key matches.")),
      );
    };
    if (!config.some((c) => c.origin && c.origin !== "default")) only.checked = false;
    only.addEventListener("change", draw);
    query.addEventListener("input", G.debounce(120, draw));
    draw();
    G.replace(
      this.config,
      G.h(
        "div",
        { class: "filters" },
        G.h("label", { class: "field" }, G.h("span", {}, "Search"), query),
        G.h("label", { class: "check" }, only, "only what differs from the defaults"),
      ),
      G.h(
        "div",
        { class: "scroll tall panel", tabindex: "0", role: "region", "aria-label": "Config" },
        G.h(
          "table",
          { class: "config" },
          G.h(
            "thead",
            {},
            G.h(
              "tr",
              {},
              ["key", "value", "origin"].map((t) => G.h("th", { scope: "col" }, t)),
            ),
          ),
          body,
        ),
      ),
    );
  }

  drawEnvironment() {
    const flat = Object.entries(this.overview.environment).flatMap(([k, v]) =>
      v && typeof v === "object" && !Array.isArray(v) ? Object.entries(v).map(([a, b]) => [a, b]) : [[k, v]],
    );
    const rows = flat
      .filter(([, v]) => v !== null && v !== "")
      .map(([k, v]) =>
        G.h(
          "div",
          {},
          G.h("dt", {}, k.replaceAll("_", " ")),
          G.h("dd", {}, Array.isArray(v) ? v.join(" ") : String(v)),
        ),
      );
    G.replace(
      this.environment,
      rows.length
        ? G.h("dl", { class: "about panel" }, rows)
        : G.h("p", { class: "empty" }, "No environment.json in the run folder."),
    );
  }

  remove() {
    this.closed = true;
    for (const chart of this.charts.values()) chart.remove();
    if (this.any) this.any.remove();
    this.element.remove();
  }
};
