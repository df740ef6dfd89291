// In the frame of a preview: shows the markup that the page sends. Scripts that are set so do not run, and the policy of
// this document (server/gateway/routes/pages.py) would let none run, load nothing, and reach nobody.

addEventListener("message", ({ source, data }) => {
  if (source === parent) document.documentElement.innerHTML = data;
}, { once: true });
