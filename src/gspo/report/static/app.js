"use strict";
// Starts the page: a report, a comparison, or the dashboard with its list of runs and its heartbeat.

(function () {
  const boot = JSON.parse(document.getElementById("boot").textContent);
  const app = document.getElementById("app");
  const main = G.h("main", { id: "main", tabindex: "-1" });
  const frame = (title, extra) =>
    app.append(
      G.h(
        "a",
        {
          class: "skip",
          href: "#main",
          onclick: (e) => {
            e.preventDefault();
            main.focus();
          },
        },
        "Skip to the content",
      ),
      G.header(title, extra),
      main,
      G.h("div", { id: "announce", class: "sr", "aria-live": "polite" }),
    );
  const problem = (error) =>
    main.append(
      G.h("p", { class: "problem", role: "alert" }, `This page could not be drawn: ${error.message}`),
    );
  G.theme.start();

  async function report() {
    const source = new G.EmbeddedSource(boot);
    frame("gspo report");
    const view = new G.RunView(source, boot.runs[0]);
    main.append(view.element);
    keys(() => view.rollouts);
    addEventListener("hashchange", () => {
      const address = G.address.read();
      if (view.rollouts.follow(address) && address.group) view.jump("rollouts", false);
      else if (address.section) view.jump(address.section, false);
    });
    await view.start();
    document.documentElement.dataset.ready = "yes";
  }

  async function compare() {
    const source = new G.EmbeddedSource(boot);
    frame("gspo compare");
    const overviews = await Promise.all(boot.runs.map((name) => source.overview(name)));
    main.append(new G.CompareView(boot.runs, overviews, boot.comparison).element);
    document.documentElement.dataset.ready = "yes";
  }

  function keys(browser) {
    addEventListener("keydown", (event) => {
      const target = event.target;
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName))
        return;
      const rollouts = browser();
      if (!rollouts) return;
      if (event.key === "j") rollouts.step(1);
      else if (event.key === "k") rollouts.step(-1);
      else if (event.key === "/") {
        event.preventDefault();
        rollouts.query.focus();
      }
    });
  }

  class Dashboard {
    constructor() {
      this.source = new G.HttpSource();
      this.view = null;
      this.picked = new Set();
      this.query = G.h("input", {
        type: "search",
        placeholder: "name, tag or model",
        "aria-label": "Search runs",
        oninput: G.debounce(120, () => this.drawHome()),
      });
      this.pulse = G.h("span", { class: "pulse", role: "status" }, "");
      frame(G.h("a", { href: "#" }, "gspo dashboard"), this.pulse);
      addEventListener("hashchange", () => this.route());
      keys(() => this.view && this.view.rollouts);
    }
    async start() {
      this.runs = await this.source.runs();
      await this.route();
      document.documentElement.dataset.ready = "yes";
      setInterval(() => this.beat(), 1500);
      document.addEventListener("visibilitychange", () => this.beat());
    }
    async route() {
      const address = G.address.read();
      const key = address.compare
        ? `compare ${address.compare}`
        : address.run
          ? `run ${address.run}`
          : "home";
      if (key === this.key) {
        if (this.view && this.view.rollouts) {
          if (this.view.rollouts.follow(address) && address.group) this.view.jump("rollouts", false);
          else if (address.section) this.view.jump(address.section, false);
        }
        return;
      }
      this.key = key;
      if (this.view) this.view.remove();
      this.view = null;
      main.replaceChildren();
      document.title = (address.run || (address.compare ? "compare" : "runs")) + " · gspo dashboard";
      try {
        if (address.compare) await this.openCompare(address.compare.split(","));
        else if (address.run) await this.openRun(address.run);
        else this.drawHome();
      } catch (error) {
        if (this.key === key)
          main.replaceChildren(
            G.h(
              "p",
              { class: "problem", role: "alert" },
              `${address.run || address.compare}: this run cannot be read (${error.message}). `,
              G.h("a", { href: "#" }, "All runs"),
            ),
          );
      }
    }
    async openRun(name) {
      const view = (this.view = new G.RunView(this.source, name));
      main.append(G.h("p", { class: "crumb" }, G.h("a", { href: "#" }, "All runs")), view.element);
      this.source.forget(this.source.overviewPath(name));
      await view.start();
    }
    async openCompare(names) {
      const path = "/api/compare?" + names.map((n) => "run=" + encodeURIComponent(n)).join("&");
      this.comparePath = path;
      this.source.forget(path);
      const answer = await this.source.changed(path);
      this.view = new G.CompareView(names, answer.overviews, answer.comparison);
      main.append(G.h("p", { class: "crumb" }, G.h("a", { href: "#" }, "All runs")), this.view.element);
    }
    drawHome() {
      if (this.key !== "home") return;
      const { folder } = this.runs;
      const words = this.query.value.trim().toLowerCase().split(/\s+/);
      const text = (run) => [run.name, run.model, run.status, ...(run.tags || [])].join(" ").toLowerCase();
      const runs = this.runs.runs.filter((run) => words.every((word) => text(run).includes(word)));
      const compare = G.h(
        "button",
        {
          type: "button",
          disabled: this.picked.size < 2,
          onclick: () => (location.hash = G.address.link({ compare: [...this.picked].join(",") })),
        },
        this.picked.size < 2 ? "Compare: choose two or more" : `Compare ${this.picked.size} runs`,
      );
      const cell = (value, label) => G.h("td", { "data-label": label }, value);
      const rows = runs.map((run) => {
        const box = G.h("input", {
          type: "checkbox",
          "aria-label": `Choose ${run.name}`,
          onchange: () => {
            this.picked[box.checked ? "add" : "delete"](run.name);
            this.drawHome();
          },
        });
        box.checked = this.picked.has(run.name);
        return G.h(
          "tr",
          {},
          G.h("td", { class: "pick" }, box),
          G.h(
            "th",
            { scope: "row" },
            G.h("a", { href: G.address.link({ run: run.name }) }, run.name),
            (run.tags || []).map((tag) =>
              G.h(
                "button",
                {
                  type: "button",
                  class: "tag",
                  "aria-label": `Runs with the tag ${tag}`,
                  onclick: () => {
                    this.query.value = tag;
                    this.drawHome();
                  },
                },
                tag,
              ),
            ),
            G.problems(run.problems),
          ),
          cell(G.badge(run.status), "status"),
          cell(
            run.total_steps && run.status !== "finished"
              ? `${run.last_step} / ${run.total_steps}`
              : String(run.last_step),
            "step",
          ),
          cell(G.sparkline(run.curve), "reward"),
          cell(
            run.accuracy === null
              ? run.held_out_reward
                ? `reward ${run.held_out_reward.map((v) => v.toFixed(3)).join(" → ")}`
                : "–"
              : run.start_accuracy === null
                ? G.percent(run.accuracy)
                : `${G.percent(run.start_accuracy)} → ${G.percent(run.accuracy)}`,
            "held-out",
          ),
          cell(G.seconds(run.seconds), "time"),
          cell(run.alarms ? String(run.alarms) : "–", "alarms"),
        );
      });
      const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
      G.replace(
        main,
        G.h(
          "div",
          { class: "run" },
          G.h("div", { class: "line spread" }, G.h("h1", {}, "Runs"), compare),
          G.h("p", { class: "note" }, folder),
          this.runs.runs.length > 1 && G.h("label", { class: "field runs-search" }, G.h("span", {}, "Search"), this.query),
          runs.length
            ? G.h(
                "div",
                { class: "scroll panel" },
                G.h(
                  "table",
                  { class: "runs" },
                  G.h(
                    "thead",
                    {},
                    G.h(
                      "tr",
                      {},
                      ["", "run", "status", "step", "reward", "held-out", "time", "alarms"].map(
                        (t) => G.h("th", { scope: "col" }, t || G.h("span", { class: "sr" }, "choose")),
                      ),
                    ),
                  ),
                  G.h("tbody", {}, rows),
                ),
              )
            : G.h(
                "p",
                { class: "empty" },
                this.runs.runs.length
                  ? "No run matches."
                  : "No runs here yet. Start one with “gspo train”; it appears by itself.",
              ),
        ),
      );
      if (focused)
        [...main.querySelectorAll("input")].find((i) => i.getAttribute("aria-label") === focused)?.focus();
    }
    async beat() {
      if (document.hidden || this.busy) return;
      this.busy = true;
      try {
        const runs = await this.source.runs();
        if (runs) this.runs = runs;
        if (this.key === "home" && runs) this.drawHome();
        else if (this.view instanceof G.RunView) await this.beatRun(this.view);
        else if (this.view instanceof G.CompareView) {
          const answer = await this.source.changed(this.comparePath);
          if (answer) this.view.update(answer.overviews, answer.comparison);
        }
        this.pulse.textContent = "";
      } catch {
        this.pulse.textContent = "The server does not answer; trying again.";
      }
      this.busy = false;
    }
    async beatRun(view) {
      const overview = await this.source.refresh(view.name, view.overview);
      if (!overview || view.closed) return;
      const before = view.overview.last_step;
      view.update(overview);
      if (overview.last_step !== before) G.say(`Step ${overview.last_step}. ${overview.verdict.headline}`);
      await view.readIndex();
    }
  }

  G.sparkline = function (values) {
    const numbers = (values || []).filter((v) => v !== null);
    if (numbers.length < 2) return "–";
    const canvas = G.h("canvas", {
      width: 220,
      height: 48,
      class: "spark",
      role: "img",
      "aria-label": `from ${G.number(numbers[0])} to ${G.number(numbers.at(-1))}`,
    });
    const c = canvas.getContext("2d"),
      low = Math.min(...numbers),
      high = Math.max(...numbers);
    c.strokeStyle = G.css("--p0");
    c.lineWidth = 3;
    c.lineJoin = "round";
    numbers.forEach((v, i) =>
      c[i ? "lineTo" : "moveTo"](
        4 + (i * 212) / (numbers.length - 1),
        43 - (38 * (v - low)) / (high - low || 1),
      ),
    );
    c.stroke();
    return G.h("span", { class: "sparkline" }, canvas, G.number(numbers.at(-1), 3));
  };

  const start = { report, compare, dashboard: () => new Dashboard().start() }[boot.mode];
  start().catch(problem);
})();
