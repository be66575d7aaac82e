showGraph(document, window, JSON.parse(document.getElementById("graph").textContent));
