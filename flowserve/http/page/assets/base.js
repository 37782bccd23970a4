"use strict";
// Creates elements and formats figures. All text is set as text, never as markup: names and errors are other people's.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

function sayOrHide(element, text) {
  say(element, text);
  element.hidden = !text;
}

// ---------------------------------------------------------------------------------------------------- formats of figures

function digits(value) {
  if (!value) return "0";
  return Math.abs(value) >= 100 ? Math.round(value).toString() : Number(value.toPrecision(3)).toString();
}

function count(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return digits(value / (unit === "k" ? 1e3 : size)) + unit;
  }
  return digits(value);
}

function bytes(value) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${digits(value)} B`;
}

function time(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 1000) return `${digits(ms / 1000)} s`;
  return ms >= 1 ? `${digits(ms)} ms` : `${digits(ms * 1000)} µs`;
}

const kind = (tensor) => `${tensor.dtype} [${tensor.dims.join(",")}]`;
