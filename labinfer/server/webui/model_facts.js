// Text beside a model's name: number of parameters, dtype and quantization, context length, layout.

const UNITS = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];

/** @param {object | undefined} model entry of `/v1/models`; it has only a name while the model is being loaded @returns {string} */
export function modelFacts(model, words) {
  const { num_parameters: parameters, stages, max_model_len: length } = model ?? {};
  if (!stages) return "";
  const kinds = stages.map(({ dtype, quantization }) => (quantization === "none" ? dtype : `${dtype} ${quantization}`));
  const sizes = [...new Set(stages.map(({ tensor_parallel_size: size }) => size))].join(", ");
  return [
    words.parameters(rounded(parameters)), [...new Set(kinds)].join(", "), words.contextOf(length.toLocaleString(words.language)),
    ...(stages.length > 1 ? [words.numStages(stages.length)] : []), ...(sizes === "1" ? [] : [`TP ${sizes}`]),
  ].join(" · ");
}

/** A count with three digits and a unit, such as 1.24B. */
function rounded(count) {
  const [unit, size] = UNITS.find(([, size]) => count >= size) ?? ["", 1];
  return Number((count / size).toPrecision(3)) + unit;
}
