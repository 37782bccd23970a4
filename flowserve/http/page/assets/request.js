// One request from the page: its form, its response and the times of its steps; and loading, unloading and keys.

const PREVIEW = 64; // elements of a tensor that are shown
const EVENTS_MAX = 200; // responses of one streamed request that are shown
const FILL_MAX = 256; // elements that the form writes out; more are sent as zeros unless another source is selected
const ITEMS = {
  BOOL: Uint8Array, UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, UINT64: BigUint64Array, INT8: Int8Array,
  INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array, FP16: Uint16Array, BF16: Uint16Array, FP32: Float32Array,
  FP64: Float64Array,
};
const TIMED = { "flowserve-timing": "1" }; // requests the response's Server-Timing header
const NOT_AS_JSON = new Set(["FP16", "BF16"]);
const FILES = { file: "raw little-endian elements", image: "an image, as its pixels" };
const isPixels = ({ dtype, dims }) => dtype === "UINT8" && dims.length === 3 && dims[2] === 3;
const product = (dims) => dims.reduce((all, dim) => all * dim, 1);

// -------------------------------------------------------------------------------------------------------------- the form

function buildForm(graph) {
  picture.isStream = graph.nodes.some((node) => node.is_decoupled);
  picture.fields = graph.inputs.map((input) => inputField(input, graph));
  picture.sequence = graph.nodes.some((node) => node.is_stateful) ? sequenceField() : null;
  const all = picture.fields.map((field) => field.set);
  if (picture.sequence) all.push(picture.sequence.set);
  $("inputs").replaceChildren(...all);
}

function inputField(input, graph) {
  const isText = input.dtype === "BYTES";
  const dims = graph.max_batch_size ? [-1, ...input.dims] : input.dims;
  const size = product(dims.map((dim) => (dim < 0 ? 1 : dim)));
  const ways = isText ? ["text", "file"] : NOT_AS_JSON.has(input.dtype) ? ["zeros", "file"] : ["JSON", "zeros", "random", "file"];
  if (isPixels(input)) ways.unshift("image");
  const usable = picture.isStream ? ways.filter((way) => ["text", "JSON", "file"].includes(way)) : ways;
  const id = `input-${graph.inputs.indexOf(input)}`;
  const way = el("select", { id: `${id}-way` }, ...usable.map((one) => el("option", { value: one, text: one })));
  if (usable[0] === "image" || (!isText && size > FILL_MAX && usable.includes("zeros"))) way.value = "zeros";
  const shape = el("input", { class: "code", id: `${id}-shape`, placeholder: "as it fits", size: "14", autocomplete: "off" });
  const text = el("textarea", { id, rows: isText ? "2" : "3", spellcheck: "false" });
  text.value = isText ? "" : JSON.stringify(Array(Math.min(size, FILL_MAX)).fill(input.dtype === "BOOL" ? false : 0));
  const file = el("input", { type: "file", id: `${id}-file` });
  const isSent = el("input", { type: "checkbox" });
  isSent.checked = !input.optional;
  const textLabel = el("label", { for: id, class: "hidden", text: `${input.name} as ${isText ? "text, an element a line" : "JSON"}` });
  const fileWords = el("span");
  const fileLabel = el("label", {}, fileWords, file);
  const controls = el("div", { class: "row" },
    el("label", { text: "from" }, way), el("label", { text: `shape of [${dims.join(",")}]` }, shape), fileLabel);
  if (input.optional) controls.append(el("label", { class: "check" }, isSent, "send it"));
  const field = { input, dims, size, way, shape, text, file, isSent };
  const swap = () => {
    text.hidden = textLabel.hidden = !["text", "JSON"].includes(way.value);
    fileLabel.hidden = !["file", "image"].includes(way.value);
    say(fileWords, isText ? "one element, as it is: an image, a text" : FILES[way.value] || "");
  };
  way.addEventListener("change", swap);
  swap();
  const legend = el("legend", {}, `${input.name} `, el("code", { text: kind(input) }));
  field.set = el("fieldset", {}, legend, controls, textLabel, text);
  return field;
}

function sequenceField() {
  const [id, start, end] = [el("input", { size: "8", value: "1", inputmode: "numeric" }), ...["", ""].map(() => el("input", { type: "checkbox" }))];
  start.checked = true;
  const set = el("fieldset", {}, el("legend", { text: "sequence" }), el("div", { class: "row" }, el("label", { text: "id" }, id),
    el("label", { class: "check" }, start, "start"), el("label", { class: "check" }, end, "end")));
  return { id, start, end, set };
}

// ----------------------------------------------------------------------------------------------------------- what is sent

// A tensor's {shape, data (JSON text) or bytes}. Throws with what is wrong with the field.
async function tensorOf(field) {
  const { input, way } = field;
  if (way.value === "file") return fromFile(field);
  if (way.value === "image") return fromImage(field);
  if (way.value === "text") {
    const lines = field.text.value.split("\n");
    return { shape: shapeOf(field, lines.length), data: JSON.stringify(lines) };
  }
  if (way.value === "JSON") {
    const typed = field.text.value.trim();
    const data = typed.startsWith("[") ? typed : `[${typed}]`;
    let parsed;
    try {
      parsed = JSON.parse(data.replace(/NaN|-?Infinity/g, "0"));
    } catch (error) {
      throw new Error(`${input.name} is no JSON: ${error.message}`);
    }
    return { shape: shapeOf(field, parsed.flat(Infinity).length), data };
  }
  const shape = shapeOf(field, field.size);
  const items = new ITEMS[input.dtype](product(shape));
  if (way.value === "random") fillRandom(items, input.dtype);
  return { shape, bytes: new Uint8Array(items.buffer) };
}

function fillRandom(items, dtype) {
  for (let i = 0; i < items.length; i++) {
    const one = Math.random();
    if (dtype.startsWith("FP")) items[i] = one;
    else if (dtype === "BOOL") items[i] = one < 0.5 ? 0 : 1;
    else items[i] = items instanceof BigInt64Array || items instanceof BigUint64Array ? BigInt(Math.floor(one * 100)) : one * 100;
  }
}

async function fromFile(field) {
  const { input } = field;
  const file = field.file.files[0];
  if (!file) throw new Error(`${input.name}: choose a file`);
  const content = new Uint8Array(await file.arrayBuffer());
  if (input.dtype !== "BYTES") {
    return { shape: shapeOf(field, Math.floor(content.length / ITEMS[input.dtype].BYTES_PER_ELEMENT)), bytes: content };
  }
  if (picture.isStream) return { shape: [1], data: JSON.stringify([new TextDecoder().decode(content)]) };
  const bytes = new Uint8Array(4 + content.length);
  new DataView(bytes.buffer).setUint32(0, content.length, true);
  bytes.set(content, 4);
  return { shape: shapeOf(field, 1), bytes };
}

// The pixels, row by row, in the input's size, or in the image's where that varies.
async function fromImage({ input, file, dims }) {
  if (!file.files[0]) throw new Error(`${input.name}: choose an image`);
  const image = await createImageBitmap(file.files[0]);
  const [height, width] = [input.dims[0], input.dims[1]].map((dim, i) => (dim < 0 ? [image.height, image.width][i] : dim));
  const pen = new OffscreenCanvas(width, height).getContext("2d");
  pen.drawImage(image, 0, 0, width, height);
  const bytes = pen.getImageData(0, 0, width, height).data.filter((_, i) => i % 4 < 3);
  return { shape: [...dims.slice(0, -3).map(() => 1), height, width, 3], bytes: new Uint8Array(bytes) };
}

// The shape that was typed; otherwise the innermost varying dimension is computed from the number of elements.
function shapeOf(field, elements) {
  const typed = field.shape.value.trim();
  if (typed) return typed.split(/[\s,]+/).map(Number);
  const shape = field.dims.map((dim) => (dim < 0 ? 1 : dim));
  const varying = field.dims.lastIndexOf(-1);
  if (varying >= 0) shape[varying] = Math.max(Math.floor(elements / product(shape)), elements ? 1 : 0);
  return shape;
}

async function bodyOf(fields) {
  const inputs = [];
  const parts = [];
  for (const field of fields.filter((one) => one.isSent.checked)) {
    const tensor = await tensorOf(field);
    const head = { name: field.input.name, datatype: field.input.dtype, shape: tensor.shape };
    if (tensor.bytes) {
      inputs.push(JSON.stringify({ ...head, parameters: { binary_data_size: tensor.bytes.length } }));
      parts.push(tensor.bytes);
    } else {
      inputs.push(`${JSON.stringify(head).slice(0, -1)},"data":${tensor.data}}`);
    }
  }
  const parameters = { binary_data_output: true, ...sequenceParameters() };
  const head = new TextEncoder().encode(`{"inputs":[${inputs.join()}],"parameters":${JSON.stringify(parameters)}}`);
  return { body: new Blob([head, ...parts]), headers: { "inference-header-content-length": String(head.length) } };
}

function sequenceParameters() {
  const asked = picture.sequence;
  if (!asked) return {};
  return { sequence_id: Number(asked.id.value), sequence_start: asked.start.checked, sequence_end: asked.end.checked };
}

async function submit(event) {
  event.preventDefault();
  if (!picture || !picture.graph || $("send").disabled) return;
  $("send").disabled = true;
  say($("sending"), "sent, waiting for the answer");
  forgetAnswer();
  const begun = performance.now();
  try {
    const text = await (picture.isStream ? stream() : infer(begun));
    say($("sending"), text);
  } catch (error) {
    say($("sending"), "");
    $("answer").replaceChildren(el("p", { class: "failed", role: "alert", text: error.message }));
    showTimeline($("timeline"), error.timing || "");
    if (error.status === 403) askForKey(error.message);
  }
  $("answer").hidden = false;
  $("send").disabled = false;
}

async function infer(begun) {
  const { body, headers: more } = await bodyOf(picture.fields);
  const response = await ask(`v2/models/${pathOf(selected)}/infer`, { method: "POST", body, headers: { ...more, ...TIMED } });
  const whole = await response.arrayBuffer();
  const took = performance.now() - begun;
  showAnswer(whole, Number(response.headers.get("inference-header-content-length") || whole.byteLength));
  showTimeline($("timeline"), response.headers.get("server-timing") || "");
  return `answered after ${time(took)}, the way here and back included`;
}

async function stream() {
  const members = [];
  for (const field of picture.fields.filter((one) => one.isSent.checked)) {
    const flat = JSON.parse((await tensorOf(field)).data).flat(Infinity);
    members.push(`${JSON.stringify(field.input.name)}:${JSON.stringify(flat)}`);
  }
  const more = Object.entries(sequenceParameters()).map(([name, value]) => `"${name}":${JSON.stringify(value)}`);
  const response = await ask(`v2/models/${pathOf(selected)}/generate_stream`, { method: "POST", body: `{${[...members, ...more].join()}}` });
  $("answer").hidden = false;
  let answers = 0;
  for await (const answer of events(response.body)) {
    answers += 1;
    if (answer.error) throw new Error(answer.error);
    if (answers <= EVENTS_MAX) $("answer").append(el("pre", { text: JSON.stringify(answer) }));
  }
  return `${answers} answers${answers > EVENTS_MAX ? `, the first ${EVENTS_MAX} shown` : ""}`;
}

// ---------------------------------------------------------------------------------------------------- what is answered

let shots = []; // addresses of images that are shown

function forgetAnswer() {
  shots.forEach((address) => URL.revokeObjectURL(address));
  shots = [];
  $("answer").replaceChildren();
  $("timeline").hidden = true;
  forgetTimes();
}

function showAnswer(whole, size) {
  const answer = JSON.parse(new TextDecoder().decode(whole.slice(0, size)));
  let at = size;
  for (const output of answer.outputs) {
    const length = (output.parameters || {}).binary_data_size || 0;
    $("answer").append(el("h3", {}, `${output.name} `, el("code", { class: "quiet", text: `${output.datatype} [${output.shape.join(",")}]` })));
    showTensor(output, whole.slice(at, at + length));
    at += length;
  }
  if (!answer.outputs.length) $("answer").append(el("p", { text: "The answer has no outputs." }));
}

function showTensor(output, data) {
  if (output.data) return showText(output.data.slice(0, PREVIEW).map(String), output.data.length);
  if (output.datatype !== "BYTES") {
    const items = new ITEMS[output.datatype](data);
    return showText([...items.slice(0, PREVIEW)].map((one) => readable(one, output.datatype)), items.length);
  }
  const view = new DataView(data);
  const texts = [];
  let elements = 0;
  for (let at = 0; at + 4 <= data.byteLength; elements++) {
    const length = view.getUint32(at, true);
    const element = new Uint8Array(data, at + 4, length);
    const type = imageType(element);
    if (elements < PREVIEW && type) showImage(element, type);
    else if (elements < PREVIEW) texts.push(new TextDecoder().decode(element));
    at += 4 + length;
  }
  if (texts.length) showText(texts, elements, "\n");
}

function showText(texts, size, between = ", ") {
  const more = size > texts.length ? `${between}… ${size - texts.length} more` : "";
  $("answer").append(el("pre", { tabindex: "0", text: texts.join(between) + more }));
}

function readable(one, dtype) {
  if (dtype === "BOOL") return one ? "true" : "false";
  if (dtype === "FP16") return digits(half(one));
  if (dtype === "BF16") return digits(new Float32Array(new Uint32Array([one << 16]).buffer)[0]);
  return dtype.startsWith("FP") ? String(Number(one.toPrecision(7))) : String(one);
}

function half(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

function imageType(content) {
  const begins = (...bytes) => bytes.every((byte, i) => content[i] === byte);
  return begins(0x89, 0x50, 0x4e, 0x47) ? "image/png" : begins(0xff, 0xd8, 0xff) ? "image/jpeg" : begins(0x47, 0x49, 0x46) ? "image/gif" : "";
}

function showImage(content, type) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  shots.push(address);
  $("answer").append(el("img", { class: "shot", src: address, alt: `${bytes(content.length)} of ${type}` }));
}
