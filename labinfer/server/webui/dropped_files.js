// Files dropped anywhere on the page.

/** @param {HTMLElement} place gets a CSS class while files are dragged over the page @param {(files: FileList) => void} ondrop */
export function takeDroppedFiles(place, ondrop) {
  const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  const mark = (over) => place.classList.toggle("dropping", over);
  addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // by default the browser opens the file
    mark(true);
  });
  addEventListener("dragleave", (event) => event.relatedTarget || mark(false));
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(false);
    ondrop(event.dataTransfer.files);
  });
}
