import { render } from "preact";
import { App } from "./app";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/controls.css";

render(<App />, document.getElementById("app")!);
