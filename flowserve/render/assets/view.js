// A picture that is larger than its window: zoom, pan, a fit that stays legible, and a map of the whole where only a
// part is visible. Shared by the page of a picture and the live page.

const LEGIBLE = 0.7; // of the picture's size: 8 px letters; a fit is never smaller, the rest is scrolled
const ZOOM_MIN = 0.1;
const ZOOM_MAX = 4;
const STEP = 1.25;
const MAP_WIDTH = 160;
const MAP_HEIGHT = 120;
const MAP_MIN = 28; // the map of a very long picture is stretched to this
const MAP_FROM = 0.75; // a map is shown while less than this part of the picture is visible
const SVG_SPACE = "http://www.w3.org/2000/svg";

class View {
  // `frame` scrolls, and its one child is the picture; `told` is called with the scale when it changes.
  constructor(frame, told = () => {}) {
    this.frame = frame;
    this.told = told;
    this.scale = 1;
    this.isFitting = true;
    this.map = document.createElementNS(SVG_SPACE, "svg");
    this.map.setAttribute("class", "map flowserve");
    this.map.setAttribute("aria-hidden", "true");
    this.map.setAttribute("hidden", "");
    frame.after(this.map);
    frame.addEventListener("wheel", (turn) => this.turned(turn), { passive: false });
    frame.addEventListener("pointerdown", (press) => this.pan(press));
    frame.addEventListener("keydown", (press) => this.key(press));
    frame.addEventListener("scroll", () => this.showMap());
    this.map.addEventListener("pointerdown", (press) => this.jump(press));
    this.map.addEventListener("pointermove", (move) => move.buttons && this.jump(move));
    new ResizeObserver(() => (this.isFitting ? this.fit() : this.showMap())).observe(frame);
  }

  // Show another picture. It keeps the scale of the one before, unless that was the fit.
  show(svg) {
    this.svg = svg;
    const { width, height } = svg.viewBox.baseVal;
    [this.width, this.height] = [width, height];
    const scale = Math.min(MAP_WIDTH / width, MAP_HEIGHT / height);
    this.map.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.map.setAttribute("preserveAspectRatio", "none");
    this.map.setAttribute("width", Math.max(width * scale, MAP_MIN));
    this.map.setAttribute("height", Math.max(height * scale, MAP_MIN));
    const boxes = [...svg.querySelectorAll("rect")].map((rect) => rect.cloneNode());
    this.part = document.createElementNS(SVG_SPACE, "rect");
    this.part.setAttribute("class", "part");
    this.map.replaceChildren(...boxes, this.part);
    if (this.isFitting) this.fit();
    else this.zoom(this.scale);
  }

  fit() {
    this.isFitting = true;
    if (!this.svg) return;
    const whole = Math.min(this.frame.clientWidth / this.width, (window.innerHeight * 0.75) / this.height);
    const wide = this.frame.clientWidth / this.width;
    this.apply(Math.min(whole >= LEGIBLE ? whole : Math.max(wide, LEGIBLE), 1));
  }

  // `at`: the point of the frame that stays where it is; its centre by default.
  zoom(scale, at = [this.frame.clientWidth / 2, this.frame.clientHeight / 2]) {
    if (!this.svg) return;
    this.isFitting = false;
    const before = this.scale;
    const centre = [this.frame.scrollLeft + at[0], this.frame.scrollTop + at[1]];
    this.apply(Math.min(Math.max(scale, ZOOM_MIN), ZOOM_MAX));
    this.frame.scrollLeft = (centre[0] * this.scale) / before - at[0];
    this.frame.scrollTop = (centre[1] * this.scale) / before - at[1];
    this.showMap();
  }

  apply(scale) {
    this.scale = scale;
    this.svg.setAttribute("width", this.width * scale);
    this.svg.setAttribute("height", this.height * scale);
    this.showMap();
    this.told(scale);
  }

  turned(turn) {
    if (!turn.ctrlKey && !turn.metaKey) return; // the page scrolls
    turn.preventDefault();
    const box = this.frame.getBoundingClientRect();
    this.zoom(this.scale * Math.exp(-turn.deltaY / 400), [turn.clientX - box.left, turn.clientY - box.top]);
  }

  key(press) {
    if (press.ctrlKey || press.metaKey || press.altKey) return;
    if (press.key === "+" || press.key === "=") this.zoom(this.scale * STEP);
    else if (press.key === "-") this.zoom(this.scale / STEP);
    else if (press.key === "0") this.zoom(1);
    else if (press.key === "f") this.fit();
    else return;
    press.preventDefault();
  }

  pan(press) {
    if (press.button || press.pointerType !== "mouse") return; // a finger scrolls by itself
    const { frame } = this;
    const begin = [press.clientX + frame.scrollLeft, press.clientY + frame.scrollTop];
    const move = (at) => {
      if (!frame.classList.contains("pans")) {
        if (Math.abs(at.clientX - press.clientX) + Math.abs(at.clientY - press.clientY) < 4) return;
        frame.classList.add("pans");
        frame.setPointerCapture(press.pointerId);
      }
      frame.scrollTo(begin[0] - at.clientX, begin[1] - at.clientY);
    };
    const end = () => {
      frame.removeEventListener("pointermove", move);
      frame.classList.remove("pans");
    };
    frame.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end, { once: true });
    window.addEventListener("pointercancel", end, { once: true });
  }

  jump(press) {
    const box = this.map.getBoundingClientRect();
    const { frame } = this;
    frame.scrollLeft = ((press.clientX - box.left) / box.width) * frame.scrollWidth - frame.clientWidth / 2;
    frame.scrollTop = ((press.clientY - box.top) / box.height) * frame.scrollHeight - frame.clientHeight / 2;
  }

  showMap() {
    if (!this.svg) return;
    const { frame, scale } = this;
    const width = Math.min(frame.clientWidth / scale, this.width);
    const height = Math.min(frame.clientHeight / scale, this.height);
    const isWhole = (width * height) / (this.width * this.height) >= MAP_FROM;
    this.map.toggleAttribute("hidden", isWhole);
    const place = { x: frame.scrollLeft / scale, y: frame.scrollTop / scale, width, height };
    for (const [name, value] of Object.entries(place)) this.part.setAttribute(name, value);
  }
}
