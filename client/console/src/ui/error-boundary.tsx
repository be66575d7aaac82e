import { Component, type ComponentChildren } from "preact";
import { ErrorBox } from "./states";

interface Props {
  /** The place that is shown. A new one is tried again. */
  place: string;
  children: ComponentChildren;
}

/** Shows an exception of a page in the place of the page: header and navigation stay. */
export class ErrorBoundary extends Component<Props, { error?: unknown }> {
  static override getDerivedStateFromError(error: unknown) {
    return { error };
  }

  override state: { error?: unknown } = {};

  override componentDidUpdate(before: Props) {
    if (this.state.error !== undefined && before.place !== this.props.place) this.retry();
  }

  override render() {
    if (this.state.error === undefined) return this.props.children;
    return <ErrorBox error={this.state.error} retry={this.retry} />;
  }

  private readonly retry = () => this.setState({ error: undefined });
}
