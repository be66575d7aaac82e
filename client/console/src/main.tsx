import { render } from "preact";
import { App } from "./app";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/controls.css";
import "./styles/pages.css";
import "./styles/rules.css";

render(<App />, document.getElementById("app")!);
