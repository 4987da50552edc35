"use strict";
(() => {
  const root = document.documentElement;
  const THEMES = ["auto", "light", "dark"];
  const kept = {
    get() { try { return localStorage.getItem("crf-theme"); } catch { return null; } },
    set(theme) { try { localStorage.setItem("crf-theme", theme); } catch { /* a page without storage */ } },
  };
  const asked = kept.get();
  root.dataset.theme = THEMES.includes(asked) ? asked : "auto";

  const openAround = (target) => {
    for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  };
  const goToHash = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    openAround(target);
    target.scrollIntoView();
    if (target.tabIndex >= 0 || target.hasAttribute("tabindex")) target.focus({ preventScroll: true });
  };

  const setUpTheme = () => {
    const button = document.getElementById("theme");
    const show = () => { button.textContent = "Theme: " + root.dataset.theme; };
    button.addEventListener("click", () => {
      root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
      kept.set(root.dataset.theme);
      show();
    });
    button.hidden = false;
    show();
  };

  const setUpFilters = () => {
    const form = document.getElementById("filters");
    if (!form) return;
    const rows = [...document.querySelectorAll(".sessions > li")];
    const said = document.getElementById("num-shown");
    const apply = () => {
      const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
      const kind = form.elements.kind.value, side = form.elements.side.value;
      let shown = 0;
      for (const row of rows) {
        const data = row.dataset;
        const isShown = words.every((word) => data.words.includes(word))
          && (!kind || (kind === "*" ? data.kinds : data.kinds.split(" ").includes(kind))) && (!side || data.side === side);
        row.hidden = !isShown;
        shown += isShown;
      }
      said.textContent = shown + " of " + rows.length + " sessions";
    };
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
    apply();
  };

  const setUpContents = () => {
    const links = new Map([...document.querySelectorAll(".toc a")].map((link) => [link.hash.slice(1), link]));
    const narrow = document.querySelector(".toc details");
    if (narrow && matchMedia("(max-width: 67.99rem)").matches) narrow.open = false;
    if (!links.size || !("IntersectionObserver" in window)) return;
    const seen = new Set();
    const observer = new IntersectionObserver((entries) => {
      for (const each of entries) each.isIntersecting ? seen.add(each.target.id) : seen.delete(each.target.id);
      const current = [...links.keys()].find((id) => seen.has(id));
      if (!current) return;
      for (const [id, link] of links) id === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }, { rootMargin: "-15% 0px -60% 0px" });
    for (const id of links.keys()) { const part = document.getElementById(id); if (part) observer.observe(part); }
  };

  const setUpScrolling = () => {
    for (const each of document.querySelectorAll(".scroll")) {
      each.scrollWidth > each.clientWidth ? each.setAttribute("tabindex", "0") : each.removeAttribute("tabindex");
    }
  };

  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details.printed")) each.open = true; });
  addEventListener("hashchange", goToHash);
  addEventListener("resize", setUpScrolling);
  document.addEventListener("toggle", setUpScrolling, true);
  addEventListener("DOMContentLoaded", () => { setUpTheme(); setUpFilters(); setUpContents(); setUpScrolling(); goToHash(); });
})();
