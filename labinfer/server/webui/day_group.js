// Heading of a conversation in the list: by day, then by month.

const DAY_MS = 86400000;

/** @param {number} time milliseconds since 1970 */
export function dayGroup(time, words, now = Date.now()) {
  const days = Math.round((startOfDay(now) - startOfDay(time)) / DAY_MS); // a day may have 23 or 25 hours
  if (days <= 0) return words.days.today;
  if (days === 1) return words.days.yesterday;
  if (days < 8) return words.days.week;
  if (days < 31) return words.days.month;
  return new Intl.DateTimeFormat(words.language, { year: "numeric", month: "long" }).format(time);
}

function startOfDay(time) {
  return new Date(time).setHours(0, 0, 0, 0);
}
