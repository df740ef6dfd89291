// Script inside the frame of a preview: shows the markup that the page sends. Scripts set by innerHTML do not run, and
// the policy of
// this document (server/gateway/routes/pages.py) forbids scripts, loads and connections.

addEventListener("message", ({ source, data }) => {
  if (source === parent) document.documentElement.innerHTML = data;
}, { once: true });
