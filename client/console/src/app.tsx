import type { ComponentType } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "./api/client";
import { useBearerToken } from "./api/token";
import { ProgramsPage } from "./programs/page";
import { href, useRoute, type Route } from "./router";
import { RulesPage } from "./rules/page";
import { ServerPage } from "./server/page";
import { useTheme, type Theme } from "./theme";
import { ErrorBoundary } from "./ui/error-boundary";
import { SignIn } from "./ui/sign-in";
import { ErrorBox, Loading } from "./ui/states";

/** A page of the navigation. It gets the route: `route.path[0]` is its own name. */
export type Page = ComponentType<{ route: Route }>;

const PAGES: { name: string; title: string; page: Page }[] = [
  { name: "rules", title: "Rules", page: RulesPage },
  // A chunk of its own: other pages do not need the graph layout.
  {
    name: "graphs",
    title: "Graphs",
    page: lazyPage(() => import("./graphs/page").then((module) => module.GraphsPage)),
  },
  { name: "programs", title: "Programs", page: ProgramsPage },
  { name: "server", title: "Server", page: ServerPage },
];

/** The console: header, navigation and the page of the route. */
export function App() {
  const route = useRoute();
  const token = useBearerToken();
  const main = useRef<HTMLElement>(null);
  const name = route.path[0] ?? "rules";
  // The playground is a page of the rules, next to them because a rule may have any name.
  const current = PAGES.find((page) => page.name === (name === "playground" ? "rules" : name));
  const place = route.path.join("/");
  const first = useRef(true);
  useEffect(() => {
    const title = name === "playground" ? "Playground" : (current?.title ?? "Not found");
    document.title = [...route.path.slice(1).reverse(), title, "gradrule"].join(" · ");
    // Screen readers and the keyboard start at the new page's top.
    if (!first.current) {
      main.current?.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    first.current = false;
  }, [place]);
  return (
    <>
      <button class="skip" type="button" onClick={() => main.current?.focus()}>
        Skip to content
      </button>
      <header class="header">
        <a class="brand" href={href("rules")}>
          <img src="./icon.svg" alt="" width="24" height="24" /> gradrule
        </a>
        <nav class="nav" aria-label="Pages">
          {PAGES.map(({ name, title }) => (
            <a href={href(name)} aria-current={name === current?.name ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <div class="header-end">
          <ThemeChoice />
          <SignIn />
        </div>
      </header>
      <main ref={main} tabIndex={-1} class="main">
        {current ? (
          // A page ends with the token: what it holds is an answer to this token.
          <ErrorBoundary key={token} place={`${place}?${route.query}`}>
            <current.page route={route} />
          </ErrorBoundary>
        ) : (
          <>
            <h1>Not found</h1>
            <p>
              The console has no page <code>{place}</code>. Start at <a href={href("rules")}>the rules</a>.
            </p>
          </>
        )}
      </main>
    </>
  );
}

function ThemeChoice() {
  const [theme, setTheme] = useTheme();
  return (
    <select
      class="select"
      aria-label="Theme"
      value={theme}
      onChange={(event) => setTheme(event.currentTarget.value as Theme)}
    >
      <option value="system">System</option>
      <option value="light">Light</option>
      <option value="dark">Dark</option>
    </select>
  );
}

/** Returns a page that loads its code when it is first shown. */
function lazyPage(load: () => Promise<Page>): Page {
  return function LazyPage(props) {
    const [state, setState] = useState<{ page?: Page; failed?: boolean }>({});
    useEffect(() => {
      load().then(
        (page) => setState({ page }),
        () => setState({ failed: true }),
      );
    }, []);
    // Browsers remember that a script did not arrive, and Vite that it asked for a style: only a new document loads them again.
    if (state.failed) return <ErrorBox error={NO_CODE} retry={() => location.reload()} />;
    return state.page ? <state.page {...props} /> : <Loading what="the page" />;
  };
}

const NO_CODE = new ApiError({
  title: "The page did not arrive",
  status: 0,
  detail: "Check that `gradrule gateway` is running and that the network reaches it.",
});
