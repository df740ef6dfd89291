// Numbers as text, with their units.

const THOUSANDS = ["", "k", "M", "G"];
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** @param {number} us microseconds */
export function duration(us) {
  if (us === 0) return "0";
  const [value, unit] = us < 1000 ? [us, "µs"] : us < 1e6 ? [us / 1000, "ms"] : [us / 1e6, "s"];
  return `${short(value)} ${unit}`;
}

/** @param {number | null | undefined} value seconds */
export function seconds(value) {
  return value === null || value === undefined ? "–" : duration(value * 1e6);
}

export function bytes(count) {
  let power = 0, value = count;
  while (value >= 1024 && power < BYTES.length - 1) [value, power] = [value / 1024, power + 1];
  return `${short(value)} ${BYTES[power]}`;
}

/** @param {number | null | undefined} share fraction from 0 to 1 */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${Number((share * 100).toFixed(share < 0.1 ? 1 : 0))} %`;
}

/** Number as text with at most four digits. */
export function short(value) {
  let power = 0;
  while (value >= 10000 && power < THOUSANDS.length - 1) [value, power] = [value / 1000, power + 1];
  const digits = Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return Number(value.toFixed(digits)) + THOUSANDS[power];
}

/** Time of day. @param {number} us since 1970 @param {boolean} withSeconds */
export function timeOfDay(us, words, withSeconds = true) {
  const parts = { hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}) };
  return new Date(us / 1000).toLocaleTimeString(words.language, { ...parts, hourCycle: "h23" });
}

/** Integer as text, with thousands separators. */
export function grouped(value, words) {
  return Math.round(value).toLocaleString(words.language);
}
